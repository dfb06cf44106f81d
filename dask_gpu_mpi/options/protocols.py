"""The network protocols of Dask that a cluster may use, and the differences between them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from dask_gpu_mpi.errors import Problem

#: A further value of the option `protocol`: TLS, with UCX for GPU memory if every rank can.
AUTO = "auto"


class Protocol(StrEnum):
    """A protocol; equal to its name in Dask, messages and files.

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
        """Whether it transfers from GPU to GPU: UCX, which must be loaded before MPI, with the same settings in every process."""
        return self is Protocol.UCX

    @property
    def allows_plain_probe(self) -> bool:
        """Whether a listener accepts a silent plain connection that is closed again; those of other protocols log errors."""
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
        """The same as of a text, for messages."""
        return repr(self.value)


class WorkerUcx(StrEnum):
    """The data that goes over UCX between workers with TLS (`network.ucx_comm`): authenticated, not encrypted."""

    #: Nothing.
    OFF = "no"
    #: GPU memory, if every rank can. It never contains code.
    AUTO = "auto"
    #: Everything large, including host memory; a rank that can't is an error.
    ALL = "yes"

    def __repr__(self) -> str:
        """The same as of a text, for messages."""
        return repr(self.value)


class Transport(NamedTuple):
    """How the workers of a job exchange data; rank 0 chooses it."""

    ucx: WorkerUcx = WorkerUcx.OFF
    #: The line for the user, with the way to change it; empty: nothing to exchange, or no GPU.
    line: Problem = Problem("")
    #: A warning that a setting of the user's opens a port; None: no setting does.
    warning: Problem | None = None
    #: Whether UCX may be used between nodes.
    between_nodes: bool = False
