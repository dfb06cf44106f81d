"""The context in which a rank takes part in the start, or reports that it can't: environment, communicator, deadline, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import ALIVE, HANGING, RANK_0_LOST
from dask_gpu_mpi.errors import DaskGpuMpiError, Problem, StartupError
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.mpi.rendezvous import DEADLINE
from dask_gpu_mpi.startup.messages import COORDINATOR, PAYLOADS, Channels


@dataclass(frozen=True)
class Patience:
    """Seconds beyond the deadline that are left to rank 0: it may have started later, or have many reports to handle."""

    #: After which its watchdog reports that its main thread hangs, in NVML or a file system; `ALIVE` comes on top.
    watchdog: float = HANGING
    #: After which the other ranks take rank 0 for dead.
    others: float = RANK_0_LOST


@dataclass
class StartContext:
    """The environment, communicator, deadline and signals that a rank starts with."""

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
    #: The type of what each kind of message carries that other packages add to those of the start.
    payloads: Mapping[str, Any] = field(default_factory=dict)
    #: The name of the deadline in messages.
    deadline_name: str = DEADLINE
    patience: Patience = Patience()
    #: A command that reports once, at its end, shows nothing of its progress.
    quiet: bool = False
    #: Reports that rank 0 hangs, and returns the exit code; None: with an error like any other.
    report_hanging: Callable[[Channels], int] | None = None
    #: How often rank 0 has looked for messages.
    beats: int = 0
    #: Whether other ranks know of this one by now.
    _has_met: bool = False
    _over: threading.Event = field(default_factory=threading.Event)

    def meet(self, agent: AgentProcess | None) -> Channels:
        """Initialise MPI, and meet the other ranks; inside `ending_in_order`, which ends the watchdog that begins here.

        Raises DaskGpuMpiError: there is no MPI; not all ranks came in time, or a signal did (`fatal`).
        """
        world = load_mpi(self.environ, self.host).COMM_WORLD
        self.timeline.lap("import mpi4py, MPI_Init")
        comm = self.comm if self.comm is not None else world
        mailbox = Mailbox(
            comm,
            self.host,
            self.deadline,
            {**PAYLOADS, **self.payloads},
            deadline_name=self.deadline_name,
            interrupted=self.signal_failure,
        )
        self.timeline.lap("join the ranks")
        self._has_met = mailbox.size > 1
        if agent is not None:
            agent.send(Order.JOINED)
        channels = Channels(mailbox, agent)
        if channels.rank == COORDINATOR:
            threading.Thread(target=self._watch, args=(channels,), name="start watchdog", daemon=True).start()
        return channels

    def _watch(self, channels: Channels) -> None:
        """Report and end the job if rank 0 is not over in time. Rank 0 itself does so for the other ranks; for it, they can't
        know the step that it was at, and a world of one rank has no other.
        """
        beats = -1
        while beats != self.beats:  # it lives, and minds its deadline, which may have grown
            while (left := self.deadline + self.patience.watchdog - time.monotonic()) > 0:
                if self._over.wait(left):
                    return
            beats = self.beats
            if self._over.wait(ALIVE):
                return
        code = 1
        try:
            code = (self.report_hanging or self._report_hanging)(channels)
            flush()
            if channels.size > 1:
                abort(code)
        finally:  # MPICH may return from the abort, and exit handlers may hang
            os._exit(code)

    def _report_hanging(self, channels: Channels) -> int:
        error = StartupError(
            f"no response before {self.deadline_name}; last step: {channels.step}",
            fix="inspect that node (nvidia-smi, df, no memory left?), or leave it out of the job",
            where=f"rank {channels.rank} of {channels.size} on {self.host}",
        )
        report_error(error)
        return error.exit_code

    def signal_failure(self) -> Failure | None:
        """The failure that a signal has made of the start; None: there was none."""
        if self.signals.got is None:
            return None
        number = self.signals.got[0]
        return Failure(Problem(f"{signal.Signals(number).name} came while the cluster started"), 128 + number)

    def raise_signal(self) -> None:
        """Raise that failure, if there is one."""
        if (failure := self.signal_failure()) is not None:
            raise failure.error(reported=False)

    @contextlib.contextmanager
    def ending_in_order(self, agent: AgentProcess | None) -> Iterator[None]:
        """Whatever is raised in here: the agent is ended, and no other rank waits for this one. The watchdog ends with it."""
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
        finally:
            self._over.set()
