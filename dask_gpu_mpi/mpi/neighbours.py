"""The ranks of this node, inspected as processes: by which launcher they were started, and which have ended or are stopped.

It is needed for ranks that do not come to the meeting, since they can't report themselves. A launcher's daemon is the parent of
all ranks that it starts on a node, and they have their number in their environment. Wrapper scripts may be in between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.base.timeouts import FAILED_GRACE, MPI_GRACE, NAME_STOPPED
from dask_gpu_mpi.errors import LauncherError, StartupError
from dask_gpu_mpi.sites.launchers import LAUNCHERS, Launched, detect

#: The daemons that start ranks on a host, and their variable with the number of ranks.
DAEMONS = {daemon: each.local_size_variable for each in LAUNCHERS for daemon in each.daemons}
#: States of a process that is stopped, by a signal or a debugger.
STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
#: Seconds between two checks for ranks of this host that have ended.
CHECK_INTERVAL = 2.0
#: Checks that must have the same result, since a rank may just be starting; more for ranks that are not first, which reports.
CHECKS, MORE_CHECKS = 2, 4


class NeighbourWatch:
    """Watches the other ranks of a node, while MPI of one rank starts.

    MPI waits in ``MPI_Init`` for a rank that has ended or is stopped before it, and no launcher ends the job then.

    `rank`: process id of the rank; `deadline`: ``time.monotonic()`` of the start.
    """

    def __init__(self, rank: int, deadline: float) -> None:
        self._rank = rank
        self._own = launched_as(rank)
        self._deadline = deadline
        self._next = time.monotonic() + CHECK_INTERVAL
        #: Whether the stopped ranks were reported.
        self._reported_stopped = False
        #: How many ranks the launcher has started here; 0: this rank does not check whether they have ended; None: not known yet.
        self._started: int | None = None
        #: Ranks that had ended at the last check, and how many checks have found that number.
        self._ended = self._checks = 0

    def check(self, now: float) -> None:
        """Raise a StartupError if ranks of this node have ended, or MPI has not come together in time.

        Ranks that are stopped are reported, once, after the deadline.
        """
        late = now - self._deadline
        if late > NAME_STOPPED and not self._reported_stopped:
            self._reported_stopped = True
            self._report_stopped()
        if late > MPI_GRACE:
            self._give_up(late - MPI_GRACE)
        if now >= self._next:
            self._next = now + CHECK_INTERVAL
            if self._started is None:
                # Each check inspects all processes, so two ranks of a host do it: one may be the rank that has ended.
                inspects = self._own is None or self._own.local_rank in (0, 1, None)
                self._started = started_here(self._rank) if inspects else 0
            if self._started > 1:
                self._check_ended(self._started)

    def _report_stopped(self) -> None:
        """Print which ranks of this node are stopped, if this rank is the first that runs."""
        beside = neighbours(self._rank)
        if self._own is not None and not self._is_first(beside):
            return
        for rank, state in sorted(beside.items()):
            if state == "stopped":
                say(
                    f"error: rank {rank} on {socket.gethostname()} was started but is stopped (by a signal or a debugger). "
                    "Fix: continue it (kill -CONT), or find out what stopped it"
                )

    def _give_up(self, late: float) -> None:
        reports = self._own is None or not self._own.rank  # the others wait until rank 0 has
        if reports or late > FAILED_GRACE:
            raise StartupError(
                "MPI did not come together before the start-up timeout (startup_timeout): at least one rank was started but "
                "does not run (stopped, or its node is down), or can't reach the others",
                fix="run it again without the node of a rank that printed nothing, or with a longer startup_timeout",
                reported=not reports,
                fatal=True,
            )

    def _check_ended(self, started: int) -> None:
        """Raise the error of ranks that have ended, if enough checks have found it; `started`: ranks of this node."""
        beside = neighbours(self._rank)
        ended = max(0, started - 1 - len(beside))
        self._checks = self._checks + 1 if ended == self._ended else 1
        self._ended = ended
        if ended and self._checks >= (CHECKS if self._is_first(beside) else MORE_CHECKS):
            raise StartupError(
                f"{ended} of the ranks that the launcher started on {socket.gethostname()} ended before MPI came together "
                f"(left: {ranks_text(sorted([self._number, *beside]))})",
                fix="read their output above; without any, call initialize() on all ranks",
                fatal=True,
            )

    @property
    def _number(self) -> int:
        """The number of this rank; -1: it is not known."""
        return -1 if self._own is None else self._own.rank

    def _is_first(self, beside: Mapping[int, str]) -> bool:
        """Whether this rank is the first of its node, but for those that are stopped: one reports for all."""
        return all(self._number < rank for rank, state in beside.items() if state != "stopped")


def neighbours(pid: int) -> dict[int, str]:
    """The other ranks that the launcher of the rank `pid` started on this host, found among the processes of its daemon.

    By number of the rank: ``"stopped"`` (by a signal or a debugger) or ``"there"``. A rank that has ended is missing. Empty if
    neither the system nor the launcher has that information.
    """
    own = launched_as(pid)
    if own is None:
        return {}
    states: dict[int, str] = {}
    try:
        daemon = psutil.Process(psutil.Process(first_process(pid)).ppid())
        for process in daemon.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                launched, status = launched_as(process.pid), process.status()
                # Processes below a wrapper script are the same rank. A rank may have started another launcher's.
                if launched is None or launched == own or launched.launcher is not own.launcher:
                    continue
                if status != psutil.STATUS_ZOMBIE and states.get(launched.rank) != "stopped":
                    states[launched.rank] = "stopped" if status in STOPPED else "there"
    except (psutil.Error, OSError):
        return {}
    return states


def started_here(pid: int) -> int:
    """The number of ranks that the launcher of the rank `pid` started on this host, if it ignores ends before ``MPI_Init``.

    Hydra ignores every rank that exits, Open MPI's mpirun those that exit with code 0. 0: other launchers end the job themselves.
    """
    try:
        daemon = psutil.Process(psutil.Process(first_process(pid)).ppid()).name()
        return int(psutil.Process(pid).environ().get(DAEMONS.get(daemon, ""), "0"))
    except (psutil.Error, OSError, ValueError):
        return 0


def launched_as(pid: int) -> Launched | None:
    """The launcher's variables of a process; None if it is not a rank, or can't be inspected."""
    try:
        return detect(psutil.Process(pid).environ())
    except (psutil.Error, OSError, LauncherError):
        return None


def first_process(pid: int, *, but_shells: bool = False) -> int:
    """The process that the launcher itself started for the rank `pid`: the rank, or the outermost wrapper script.

    `but_shells`: stop below a shell in which a user has typed the command (``srun --pty bash``), since it continues afterwards.
    """
    launched = launched_as(pid)
    try:
        while launched is not None and launched_as(above := psutil.Process(pid).ppid()) == launched:
            if but_shells and _typed(above, pid):
                break
            pid = above
    except psutil.Error:
        pass
    return pid


def _typed(shell: int, pid: int) -> bool:
    """Whether a process has job control on a terminal, and has started this one as a separate job.

    The shell of a wrapper script leaves its commands in its own process group.
    """
    try:
        group, session, terminal, foreground = (
            int(field) for field in Path(f"/proc/{shell}/stat").read_text().rpartition(")")[2].split()[2:6]
        )
        job = os.getpgid(pid)
    except (OSError, ValueError):
        return False
    return terminal != 0 and group != job and (session == shell or foreground == job)


def is_child_of(pid: int) -> bool:
    """Whether this process was started by the process `pid` or its children, with no launcher between them."""
    try:
        for above in psutil.Process().parents():
            if above.name() in DAEMONS:
                return False
            if above.pid == pid:
                return True
    except psutil.Error:
        pass
    return False


def parent_of(pid: int) -> int:
    """The parent of a process; 0: it has ended."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        return psutil.Process(pid).status() in STOPPED
    except psutil.Error:
        return False


def kill_rank(pid: int) -> None:
    """Kill a rank, and the wrapper script for which the launcher waits: it would turn the signal into an exit code."""
    for each in dict.fromkeys((first_process(pid, but_shells=True), pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
