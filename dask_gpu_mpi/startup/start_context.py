"""The frame of a start on one rank: its context (`StartContext`), and the exchange of messages until it is over (`until_over`).

Both are the same for a rank that takes part, for one that only reports that it can't, and for the commands `plan` and `check`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.streams import flush, write
from dask_gpu_mpi.base.text import fold_names
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import ALIVE, FLUSH, HANGING, RANK_0_LOST
from dask_gpu_mpi.errors import DaskGpuMpiError, Problem, StartupError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.mpi.mailbox import Event, Mailbox
from dask_gpu_mpi.mpi.rendezvous import DEADLINE
from dask_gpu_mpi.startup.coordinator import FailureCoordinator
from dask_gpu_mpi.startup.messages import COORDINATOR, PAYLOADS, POLL_BUSY, Channels, Kind


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
    #: Seconds beyond the deadline after which the watchdog of rank 0 reports that its main thread hangs, in NVML or a file system
    #: (`ALIVE` comes on top), and after which the other ranks assume that rank 0 is dead.
    hanging: float = HANGING
    rank_0_lost: float = RANK_0_LOST
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
            while (left := self.deadline + self.hanging - time.monotonic()) > 0:
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


class Serving(Protocol):
    """A rank that takes part: what it does with the messages that are not about the end of the start."""

    def poll(self) -> None:
        """Send what has become known since."""

    def on_event(self, event: Event) -> None:
        """Do what rank 0 asks for, and report what the agent has done."""


def until_over(
    channels: Channels, context: StartContext, coordinator: FailureCoordinator | None, relay: Serving | None
) -> Any:
    """Serve the start until it is over; raises the one report.

    The result is the outcome of the coordinator on rank 0; elsewhere what that has sent: a `Cluster`, or an exit code.
    """
    progress = Progress(context.started)
    signalled: Failure | None = None
    while True:
        if signalled is None and (signalled := context.signal_failure()) is not None:
            channels.send(COORDINATOR, Kind.FAILED, signalled)
        if relay is not None:
            relay.poll()
        events = channels.events(POLL_BUSY)
        for number, event in enumerate(events):
            if coordinator is not None and coordinator.handle(event, time.monotonic()):
                continue
            if _is(event, Kind.CLUSTER_UP) or _is(event, Kind.DONE):
                channels.push_back(events[number + 1 :])
                return event.payload
            if _is(event, Kind.FAIL):
                raise event.payload.error(reported=True)
            if _is(event, Kind.START):
                context.deadline = max(context.deadline, time.monotonic() + event.payload.limit)
            if relay is not None:
                relay.on_event(event)
        if coordinator is not None:
            if (outcome := _tick(coordinator, progress, channels, context)) is not None:
                return outcome
        elif time.monotonic() > context.deadline + context.rank_0_lost:
            raise StartupError(
                f"no response before {context.deadline_name}",
                where="rank 0",
                fix="inspect the node of rank 0 (is that rank stopped, the node down?), or leave that node out of the job",
                reported=channels.rank != 1,
                fatal=True,
            )


def _is(event: Event, kind: Kind) -> bool:
    """Whether this is a message of that kind: an agent has answers of the same names."""
    return event.source is not None and event.kind == kind


def _tick(
    coordinator: FailureCoordinator, progress: Progress, channels: Channels, context: StartContext
) -> object:
    """Let the coordinator decide, and show how far the start has come."""
    now = time.monotonic()
    context.beats += 1
    coordinator.tick(now)
    context.deadline = max(context.deadline, coordinator.deadline)
    outcome = coordinator.outcome
    if outcome is None:
        if not context.quiet:
            progress.show(now, coordinator.progress)
        return None
    progress.clear()
    if not isinstance(outcome, DaskGpuMpiError):
        return outcome
    # Ranks that are worlds of one, under a foreign launcher, are all rank 0.
    alone = context.comm is None and channels.size == 1
    if alone and launcher_check.wait_for_rank_0_to_report(context.environ):
        outcome.reported = True
    if not outcome.fatal:
        # Printed before any other rank can exit: a launcher ends all ranks when one fails. (A fatal one is printed by
        # `ending_in_order`, which aborts: a rank that does not respond can't be sent it.)
        report_error(outcome)
        channels.mailbox.send_all(Kind.FAIL, Failure.of(outcome))
        channels.mailbox.flush(FLUSH)
    raise outcome


#: Seconds before the first line, and between lines: on a terminal, and elsewhere.
ON_TERMINAL, IN_FILE = 0.5, 10.0
#: Hosts named at most.
NAMED = 8


class Progress:
    """Shows the hosts that are awaited since the start began at `started`; on standard error, unless another stream is given."""

    def __init__(self, started: float, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._every = ON_TERMINAL if self._terminal else IN_FILE
        self._next = started + self._every
        self._shown = False

    def show(self, now: float, progress: Callable[[], tuple[int, int | None, Sequence[str]]]) -> None:
        """Print how many workers are ready, and which hosts are awaited, as `FailureCoordinator.progress` counts them.

        It does neither while it is too early for another line.
        """
        if now < self._next:
            return
        self._next = now + self._every
        ready, planned, hosts = progress()
        known = sorted(set(hosts))
        names = fold_names(known[:NAMED]) + (" and others" if len(known) > NAMED else "")
        count = "starting" if planned is None else f"{ready} of {planned} workers"
        self._write(f"dask_gpu_mpi: {count}, waiting for {names or 'the scheduler'}")

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._terminal and self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        write(self._stream, f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._shown = True
