"""The network protocols of Dask that a cluster may use, and what differs between them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from dask_gpu_mpi.errors import Problem

#: What `protocol` may be besides: TLS, with UCX beside it for GPU memory where every rank can.
AUTO = "auto"


class Protocol(StrEnum):
    """A protocol; equal to its name, which is what Dask, messages and files have.

    Examples
    --------
    >>> Protocol("tls").encrypts, Protocol.UCX.encrypts
    (True, False)
    >>> f"{Protocol.UCX}://h1:8786"
    'ucx://h1:8786'
    """

    TLS = "tls"
    TCP = "tcp"
    UCX = "ucx"

    @property
    def encrypts(self) -> bool:
        """Whether connections are encrypted, and both ends show the job's certificate: there are credentials to make and send."""
        return self is Protocol.TLS

    @property
    def moves_device_memory(self) -> bool:
        """Whether it goes from GPU to GPU: UCX, which has to be loaded before MPI, and set up alike in every process."""
        return self is Protocol.UCX

    @property
    def allows_plain_probe(self) -> bool:
        """Whether a listener minds nothing about a plain connection that says nothing and hangs up; others complain of it."""
        return self is Protocol.TCP

    @classmethod
    def of(cls, address: str) -> Protocol | None:
        """The protocol of an address; None: one of distributed's others, or none.

        >>> Protocol.of("tcp://h1:8786"), Protocol.of("ws://h1:8786"), Protocol.of("h1:8786")
        ('tcp', None, None)
        """
        scheme, separator, _ = address.partition("://")
        return cls(scheme) if separator and scheme in list(cls) else None

    def __repr__(self) -> str:
        """As any text: messages show values so."""
        return repr(self.value)


class WorkerUcx(StrEnum):
    """What goes over UCX between workers whose connections are TLS (`network.ucx_comm`): authenticated, and not encrypted."""

    #: Nothing.
    OFF = "no"
    #: Memory of GPUs, where every rank can: what nobody can take for code.
    AUTO = "auto"
    #: Everything large, host memory too; a rank that can't is an error.
    ALL = "yes"

    def __repr__(self) -> str:
        """As any text: messages show values so."""
        return repr(self.value)


class Transport(NamedTuple):
    """How the workers of a job exchange data; rank 0 chooses it."""

    ucx: WorkerUcx = WorkerUcx.OFF
    #: The line for the user, with what to do if that is not what the user wants; empty: nothing to exchange, or no GPU.
    line: Problem = Problem("")
    #: What a setting of the user's has opened; None: nothing.
    warning: Problem | None = None
    #: Whether UCX may lead from node to node.
    between_nodes: bool = False
