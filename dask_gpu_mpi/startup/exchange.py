"""The messages of the start, on one rank: handled and passed on until the start is over, with a result or the one report.

Rank 0 shows the progress meanwhile: one line that changes on a terminal, else a line every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.base.streams import write
from dask_gpu_mpi.base.text import fold_names
from dask_gpu_mpi.base.timeouts import FLUSH
from dask_gpu_mpi.errors import DaskGpuMpiError, StartupError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.startup.coordinator import FailureCoordinator
from dask_gpu_mpi.startup.messages import COORDINATOR, POLL_BUSY, Channels, Event, Kind
from dask_gpu_mpi.startup.start_context import StartContext

__all__ = ["Progress", "report_to_all", "until_over"]


class Serving(Protocol):
    """A rank that takes part: what it does with the messages that are not about the end of the start."""

    def poll(self) -> None:
        """Send what has become known since."""

    def on_event(self, event: Event) -> None:
        """Do what rank 0 asks for, and report what the agent has done."""


def until_over(
    channels: Channels, context: StartContext, coordinator: FailureCoordinator | None, relay: Serving | None
) -> Any:
    """Serve the start until it is over.

    Returns
    -------
    object
        On rank 0 the outcome of its coordinator; on the others what that has sent them: a `Cluster`, or an exit code.

    Raises
    ------
    DaskGpuMpiError
        The one report.
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
        elif time.monotonic() > context.deadline + context.patience.others:
            error = StartupError(
                f"rank 0: no response before {context.deadline_name}. Fix: inspect the node of rank 0 (is that rank stopped, the "
                "node down?), or leave that node out of the job",
                reported=channels.rank != 1,
            )
            error.fatal = True
            raise error


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
        if not context.quiet and progress.due(now):
            progress.show(now, *coordinator.progress())
        return None
    progress.clear()
    if not isinstance(outcome, DaskGpuMpiError):
        return outcome
    # Ranks that are worlds of one, under a foreign launcher, are all rank 0.
    alone = context.comm is None and channels.size == 1
    if alone and launcher_check.wait_for_rank_0_to_report(context.environ):
        outcome.reported = True
    if (
        not outcome.fatal
    ):  # else `ending_in_order` prints it and aborts: a rank that does not respond can't be sent it
        report_to_all(channels.mailbox, outcome)
    raise outcome


def report_to_all(mailbox: Mailbox, error: DaskGpuMpiError) -> None:
    """Print the one report, and have all other ranks raise it.

    Printed before any other rank can exit: a launcher ends all ranks when one fails.
    """
    report_error(error)
    mailbox.send_all(Kind.FAIL, Failure.of(error))
    mailbox.flush(FLUSH)


#: Seconds before the first line, and between lines: on a terminal, and elsewhere.
ON_TERMINAL, IN_FILE = 0.5, 10.0
#: Hosts named at most.
NAMED = 8


class Progress:
    """Shows who is still awaited.

    Parameters
    ----------
    started : float
        Time of the start, seconds.
    stream : file, optional
        Default: standard error.
    """

    def __init__(self, started: float, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._every = ON_TERMINAL if self._terminal else IN_FILE
        self._next = started + self._every
        self._shown = False

    def due(self, now: float) -> bool:
        """Whether it is time for a line; asked before the numbers are counted."""
        return now >= self._next

    def show(self, now: float, ready: int, planned: int | None, hosts: Sequence[str]) -> None:
        """Print how many workers are ready, and which hosts are awaited; nothing while it is too early for another line.

        Parameters
        ----------
        now : float
            Time, seconds.
        ready, planned : int, int or None
            Workers; None while there is no plan.
        hosts : sequence of str
            Those that are awaited; ``""`` for a rank whose host is not known.
        """
        if now < self._next:
            return
        self._next = now + self._every
        known = sorted({host for host in hosts if host})
        names = fold_names(known[:NAMED]) + (" and others" if len(known) > NAMED else "")
        unknown = sum(not host for host in hosts)
        parts = [names] if names else []
        if unknown:
            parts.append(f"{unknown} {'rank that has' if unknown == 1 else 'ranks that have'} not responded")
        count = "starting" if planned is None else f"{ready} of {planned} workers"
        self._write(f"dask_gpu_mpi: {count}, waiting for {' and '.join(parts) or 'the scheduler'}")

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._terminal and self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        write(self._stream, f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._shown = True
