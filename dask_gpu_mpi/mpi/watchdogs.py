"""Watchdogs that end a job: whose launcher does not end, or whose ranks never join."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.base.timeouts import LAUNCHER_PATIENCE, MPI_GRACE, NAME_STOPPED
from dask_gpu_mpi.mpi.launcher_check import first_process, launched_as, neighbours, started_here

# A launcher that does not end when its job is aborted.
#
# Open MPI 5's ``mpirun`` then waits for the daemons of all hosts: forever if a host no longer answers, and SIGTERM has no
# effect. The batch job would remain until its walltime. So before a rank aborts the job, it starts a process that watches the
# launcher.

#: Process names of launchers that are known to hang.
HANGING = ("mpirun", "mpiexec", "orterun", "prterun")

# By a descriptor, since the number may be another process's by then. It is readable once the process has ended.
_CODE = """
import os, select, signal, sys
fd, pid, patience = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if not select.select([fd], [], [], patience)[0]:
    try:
        with open(os.open("/proc/%d/fd/2" % pid, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "w") as file:
            print("dask_gpu_mpi: the launcher has not ended %g s after the job was aborted: it is killed" % patience, file=file)
    except OSError:
        pass
    signal.pidfd_send_signal(fd, signal.SIGKILL)
"""


def look_after_launcher(pid: int | None = None, patience: float = LAUNCHER_PATIENCE) -> None:
    """Start a process that kills the launcher if it has not ended after `patience` seconds.

    `pid`: the launcher; None: the parent of this process, if its name is in `HANGING`.
    """
    with contextlib.suppress(OSError):  # it has ended, or this kernel has no descriptors of processes
        if pid is None:
            pid = os.getppid()
            if Path(f"/proc/{pid}/comm").read_text().strip() not in HANGING:
                return
        fd = os.pidfd_open(pid)
        try:
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(fd), str(pid), str(patience)],
                # The launcher waits until no process has the rank's output open.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(fd,),
                # The launcher ends this rank with everything in its session.
                start_new_session=True,
            )
        finally:
            os.close(fd)


# The agent watches its rank until all ranks have joined: the rank itself is in ``MPI_Init`` and can check nothing.
#
# All ranks would wait for one that has ended or is stopped before ``MPI_Init``. The agents report that and end their ranks: a
# launcher ends all when one is killed.

#: Seconds between two checks for ranks of this host that have ended.
CHECK_INTERVAL = 2.0
#: Checks that must have the same result, since a rank may just be starting; more for ranks that are not first, which reports.
CHECKS, MORE_CHECKS = 2, 4
#: Seconds for the launcher to forward all output before it ends the job.
FORWARD = 0.5
#: Seconds between checks whether the launcher is still there.
LAUNCHER_INTERVAL = 1.0


class StartWatch:
    """Watches one rank, and the other ranks of its node.

    `rank`: process id of the rank, the parent of this process. `deadline`: ``time.monotonic()`` at which a rank that has not
    joined the others is ended. `speaks`: whether to report that: one rank is enough. `over`: whether the rank has joined, or
    the agent closes. `started`: whether the rank has also been told to start something, so that it handles messages. Until then
    it may hang in a driver, and is ended when its launcher has died.
    """

    def __init__(
        self,
        rank: int,
        deadline: float,
        *,
        speaks: bool,
        over: Callable[[], bool],
        started: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._deadline = deadline
        self._speaks = speaks
        self._told_over = over
        self._has_started = started

    def begin(self) -> None:
        """Watch, in the running event loop."""
        loop = asyncio.get_running_loop()
        launched = launched_as(self._rank)
        # Each check inspects all processes, so two ranks of a host do it: one may be the rank that has ended.
        checks = launched is None or launched.local_rank in (0, 1, None)
        if checks and (started := started_here(self._rank)) > 1:
            loop.call_later(CHECK_INTERVAL, self._check_neighbours, started, 0, 0)
        # asyncio's clock is time.monotonic(), the same for all processes of a host.
        loop.call_at(self._deadline - (MPI_GRACE - NAME_STOPPED), self._name_the_stopped)
        loop.call_at(self._deadline, self._lose_patience)
        if launched is not None and (launcher := self._launcher()):
            loop.call_later(LAUNCHER_INTERVAL, self._check_launcher, launcher)

    def _launcher(self) -> int | None:
        """The process that started the rank, or a wrapper script around it; None: it can't be inspected."""
        import psutil

        try:
            return psutil.Process(first_process(self._rank, but_shells=True)).ppid()
        except psutil.Error:
            return None

    def _check_launcher(self, launcher: int) -> None:
        if self._has_started() or os.getppid() != self._rank:
            return
        if self._launcher() not in (launcher, None):
            say(
                f"error: the launcher of process {self._rank} on {socket.gethostname()} (process {launcher}) has ended, and "
                "this rank with it. Fix: read its output, or the log of the batch system"
            )
            self._kill_rank()
        else:
            asyncio.get_running_loop().call_later(LAUNCHER_INTERVAL, self._check_launcher, launcher)

    def _over(self) -> bool:
        return self._told_over() or os.getppid() != self._rank

    def _check_neighbours(self, started: int, before: int, checks: int) -> None:
        """Report ranks that have ended before ``MPI_Init``: below Hydra and Open MPI's mpirun the others wait forever."""
        if self._over():
            return
        beside = neighbours(self._rank)
        ended = max(0, started - 1 - len(beside))
        checks = 0 if not ended else checks + 1 if ended == before else 1
        launched = launched_as(self._rank)
        rank = launched.rank if launched is not None else -1
        first = rank < min((each for each, state in beside.items() if state != "stopped"), default=1 << 62)
        loop = asyncio.get_running_loop()
        if checks >= (CHECKS if first else MORE_CHECKS):
            say(
                f"error: {ended} of the ranks that the launcher started on {socket.gethostname()} ended before MPI came together "
                f"(left: {ranks_text(sorted([rank, *beside]))}). Fix: read their output above"
            )
            loop.call_later(FORWARD, self._end_rank)
            return
        loop.call_later(CHECK_INTERVAL, self._check_neighbours, started, ended, checks)

    def _name_the_stopped(self) -> None:
        """Report the stopped ranks of this host, for which all ranks wait; one agent of the host does."""
        if self._over():
            return
        beside = neighbours(self._rank)
        launched = launched_as(self._rank)
        others = [rank for rank, state in beside.items() if state != "stopped"]
        if launched is not None and launched.rank > min(others, default=launched.rank):
            return
        for rank, state in sorted(beside.items()):
            if state == "stopped":
                say(
                    f"error: rank {rank} on {socket.gethostname()} was started but is stopped (by a signal or a debugger). "
                    "Fix: continue it (kill -CONT), or find out what stopped it"
                )

    def _lose_patience(self) -> None:
        """End the rank: it has waited for another rank, in a call of its MPI library, for longer than a start may take."""
        if self._over():
            return
        if self._speaks:
            say(
                "error: MPI did not come together before the start-up timeout (startup_timeout): at least one rank was started "
                "but does not run (stopped, or its node is down), or can't reach the others. Fix: run it again without the node "
                "of a rank that printed nothing, or with a longer startup_timeout"
            )
        self._end_rank()

    def _end_rank(self) -> None:
        # It may have joined or ended since, and its number may be another process's by now.
        if not self._over():
            self._kill_rank()

    def _kill_rank(self) -> None:
        # A wrapper script, for which the launcher waits, would turn the signal into an exit code; Hydra reacts to signals only.
        for pid in dict.fromkeys((first_process(self._rank, but_shells=True), self._rank)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
