"""What every rank needs to take part in the start, or to report that it can't: environment, communicator, deadline, signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.mpi.signals import Signals

from .channels import Channels
from .messages import PAYLOADS

__all__ = ["StartContext"]


@dataclass
class StartContext:
    """What a rank starts with."""

    #: The process's environment.
    environ: Mapping[str, str] = field(repr=False)
    #: mpi4py's communicator; None: ``COMM_WORLD``.
    comm: Any
    #: Whether this rank has a script to run, should it be the client's.
    has_client: bool
    #: ``time.monotonic()`` of the start, and of the start-up deadline.
    started: float
    deadline: float
    #: A signal that comes meanwhile ends the start on all ranks.
    signals: Signals
    #: Of this process.
    timeline: Timeline
    host: str = field(default_factory=socket.gethostname)
    #: The type of what each kind of message carries that ranks send once the cluster is up.
    payloads_when_up: Mapping[str, Any] = field(default_factory=dict)
    #: A command that reports once, at its end, shows nothing of its progress.
    quiet: bool = False
    #: Whether other ranks know of this one by now.
    _has_met: bool = False

    def meet(self, agent: AgentProcess | None) -> Channels:
        """Initialise MPI, and meet the other ranks.

        Raises
        ------
        DaskGpuMpiError
            There is no MPI; not all ranks came in time, or a signal did (`fatal`).
        """
        world = load_mpi(self.environ, self.host).COMM_WORLD
        self.timeline.lap("import mpi4py, MPI_Init")
        comm = self.comm if self.comm is not None else world
        payloads = {**PAYLOADS, **self.payloads_when_up}
        mailbox = Mailbox(comm, self.host, self.deadline, payloads, interrupted=self.signal_failure)
        self.timeline.lap("join the ranks")
        self._has_met = mailbox.size > 1
        if agent is not None:
            agent.send(Order.JOINED)
        return Channels(mailbox, agent)

    def signal_failure(self) -> Failure | None:
        """The failure that a signal has made of the start; None: there was none."""
        if self.signals.got is None:
            return None
        number = self.signals.got[0]
        return Failure(f"{signal.Signals(number).name} came while the cluster started", 128 + number)

    def raise_signal(self) -> None:
        """Raise that failure, if there is one."""
        if (failure := self.signal_failure()) is not None:
            raise failure.error(reported=False)

    @contextlib.contextmanager
    def ending_in_order(self, agent: AgentProcess | None) -> Iterator[None]:
        """Whatever is raised in here: the agent is ended, and no other rank waits for this one."""
        try:
            yield
        except BaseException as error:
            ours = isinstance(error, DaskGpuMpiError)
            if isinstance(error, DaskGpuMpiError) and error.fatal:
                report_error(error)
            if agent is not None:
                agent.close(1.0)
            if isinstance(error, DaskGpuMpiError) and error.fatal:
                abort(error.exit_code)
            if isinstance(error, Exception) and not ours and self._has_met:
                # A defect of ours: the others can't know, and would wait for this rank.
                traceback.print_exc()
                abort(1)
            raise
