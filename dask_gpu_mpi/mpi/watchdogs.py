"""The launcher from a rank's view: one that does not end, ranks that never come, and ports that it leaves open."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import psutil

from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.signals import descriptor_of, open_process
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.base.timeouts import FAILED_GRACE, LAUNCHER_PATIENCE, MPI_GRACE, NAME_STOPPED, READING
from dask_gpu_mpi.errors import LauncherError, Problem, StartupError
from dask_gpu_mpi.sites.launchers import LAUNCHERS, Launched, detect

# The other ranks of this host, inspected from outside: which run, and which are stopped.
#
# This is for the report about a rank that does not respond. A launcher's daemon is the parent of all ranks that it starts on a
# host, and they have their number in their environment.

#: The daemons that start ranks on a host, and their variable with the number of ranks.
DAEMONS = {daemon: each.local_size for each in LAUNCHERS for daemon in each.daemons}
#: States of a process that is stopped, by a signal or a debugger.
STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


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
                # Wrapper scripts may be between the launcher and a rank: processes below them are the same rank.
                # A rank may have started another launcher's.
                if launched is None or launched == own or launched.launcher is not own.launcher:
                    continue
                if status != psutil.STATUS_ZOMBIE and states.get(launched.rank) != "stopped":
                    states[launched.rank] = "stopped" if status in STOPPED else "there"
    except (psutil.Error, OSError):
        return {}
    return states


def started_here(pid: int) -> int:
    """The number of ranks that the launcher of the rank `pid` started on this host, if it ignores ends before ``MPI_Init``.

    Hydra ignores every rank that exits, Open MPI's mpirun those that exit with code 0. Other launchers end the job by themselves:
    the number is 0.
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


# A launcher that does not end when its job is aborted.
#
# Open MPI 5's ``mpirun`` then waits for the daemons of all hosts: forever if a host no longer answers, and SIGTERM has no
# effect. The batch job would remain until its walltime. So before a rank aborts the job, it starts a process that watches the
# launcher.


def report_lost_launcher(rank: int, launcher: int) -> None:
    """Print that the launcher of a rank has ended, by their process ids."""
    say(
        f"error: the launcher of process {rank} on {socket.gethostname()} (process {launcher}) has ended, and this rank with it. "
        "Fix: read its output, or the log of the batch system"
    )


#: Process names of launchers that are known to hang.
HANGING = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
#: Processes between such a launcher and the ranks of a node.
PROXIES = ("hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy", "prted", "orted")

# By a descriptor, since the number may be another process's by then. It is readable once the process has ended.
_CODE = """
import ctypes, os, select, sys
fd, pid, patience = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if not select.select([fd], [], [], patience)[0]:
    try:
        with open(os.open("/proc/%d/fd/2" % pid, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "w") as file:
            print("dask_gpu_mpi: the launcher has not ended %g s after the job was aborted: it is killed" % patience, file=file)
    except OSError:
        pass
    ctypes.CDLL(None).syscall(424, fd, 9, None, 0)  # pidfd_send_signal, which some builds of Python lack
"""


def _launcher_above(rank: int) -> Iterator[psutil.Process]:
    """The processes of a launcher above the process `rank` on this node, the nearest first; psutil.Error: the rank has ended."""
    for process in psutil.Process(first_process(rank)).parents():
        name = process.name()
        if name in PROXIES + HANGING:
            yield process
        if name not in PROXIES:  # above its command may be another launcher, of other processes
            return


def look_after_launcher() -> None:
    """Start a process that kills the launcher of this rank, if it is on this node, may hang, and does not end in time."""
    # it has ended, or this kernel has no descriptors of processes
    with contextlib.suppress(OSError, psutil.Error):
        pid = next((each.pid for each in _launcher_above(os.getpid()) if each.name() in HANGING), None)
        if pid is None:
            return
        fd = open_process(pid)
        try:
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(fd), str(pid), str(LAUNCHER_PATIENCE)],
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


#: Seconds for a command of the batch system to end a step.
ENDING_STEP = 10.0


def end_job(code: int, environ: Mapping[str, str]) -> NoReturn:
    """End this rank, and with it the job, in which other ranks do not respond; `environ`: with the launcher's variables.

    Most launchers end all ranks when one ends with a code other than 0. Hydra reacts to signals only, and srun to neither.
    """
    look_after_launcher()
    flush()
    # In one of ten jobs, MPICH's launcher ended because of an abort before it had printed that output.
    wait_until_read((1, 2), READING)
    try:
        launched = detect(environ)
    except LauncherError:
        launched = None
    if launched is not None and (launched.size or 2) > 1:
        if command := launched.launcher.end_command(environ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    timeout=ENDING_STEP,
                )
        if launched.launcher.reacts_to_signals_only:
            kill_rank(os.getpid())
    os._exit(code)


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


# Ranks that never come. MPI of all others waits in ``MPI_Init`` for one that has ended or is stopped before it, and no launcher
# ends the job then. So each rank inspects the others of its node until its MPI has started.

#: Seconds between two checks for ranks of this host that have ended.
CHECK_INTERVAL = 2.0
#: Checks that must have the same result, since a rank may just be starting; more for ranks that are not first, which reports.
CHECKS, MORE_CHECKS = 2, 4


class NeighbourWatch:
    """Watches the other ranks of a node, while MPI of one rank starts.

    `rank`: process id of that rank; `deadline`: ``time.monotonic()`` of the start.
    """

    def __init__(self, rank: int, deadline: float) -> None:
        self._rank = rank
        self._deadline = deadline
        self._next = time.monotonic() + CHECK_INTERVAL
        self._stopped_due = deadline + NAME_STOPPED
        #: How many ranks the launcher has started here; None: not known yet.
        self._started: int | None = None
        #: Ranks that had ended at the last check, and how many checks have found that number.
        self._ended = self._checks = 0

    def check(self, now: float) -> None:
        """Raise a StartupError if ranks of this node have ended, or MPI has not come together in time.

        Ranks that are stopped are reported, once, after the deadline.
        """
        if now > self._stopped_due:
            self._stopped_due = float("inf")
            self._name_the_stopped()
        if now > self._deadline + MPI_GRACE:
            launched = launched_as(self._rank)
            reports = launched is None or not launched.rank  # the others wait until rank 0 has
            if reports or now > self._deadline + MPI_GRACE + FAILED_GRACE:
                raise StartupError(
                    "MPI did not come together before the start-up timeout (startup_timeout): at least one rank was started but "
                    "does not run (stopped, or its node is down), or can't reach the others",
                    fix="run it again without the node of a rank that printed nothing, or with a longer startup_timeout",
                    reported=not reports,
                    fatal=True,
                )
        if now < self._next:
            return
        self._next = now + CHECK_INTERVAL
        if self._started is None:
            launched = launched_as(self._rank)
            # Each check inspects all processes, so two ranks of a host do it: one may be the rank that has ended.
            inspects = launched is None or launched.local_rank in (0, 1, None)
            self._started = started_here(self._rank) if inspects else 0
        if self._started > 1:
            self._check_ended(self._started)

    def _check_ended(self, started: int) -> None:
        beside = neighbours(self._rank)
        ended = max(0, started - 1 - len(beside))
        self._checks = self._checks + 1 if ended == self._ended else 1
        self._ended = ended
        launched = launched_as(self._rank)
        rank = launched.rank if launched is not None else -1
        first = rank < min((each for each, state in beside.items() if state != "stopped"), default=1 << 62)
        if ended and self._checks >= (CHECKS if first else MORE_CHECKS):
            raise StartupError(
                f"{ended} of the ranks that the launcher started on {socket.gethostname()} ended before MPI came together "
                f"(left: {ranks_text(sorted([rank, *beside]))})",
                fix="read their output above",
                fatal=True,
            )

    def _name_the_stopped(self) -> None:
        beside = neighbours(self._rank)
        launched = launched_as(self._rank)
        others = [rank for rank, state in beside.items() if state != "stopped"]
        if launched is not None and launched.rank > min(others, default=launched.rank):
            return  # one rank of the node reports
        for rank, state in sorted(beside.items()):
            if state == "stopped":
                say(
                    f"error: rank {rank} on {socket.gethostname()} was started but is stopped (by a signal or a debugger). "
                    "Fix: continue it (kill -CONT), or find out what stopped it"
                )


# The launcher's ports. Open MPI's daemons and Hydra listen on all interfaces for the whole job, and check nobody who connects
# (docs/security-audit.md). They need no new connection once MPI of all ranks has started, and have no setting that closes a port.
# So each listening socket gets a random key of TCP's MD5 option: the system drops every packet without a digest by it.
# Connections that exist have sockets of their own, without the key. A socket filter would do the same, but for root only: since
# June 2026 Linux requires CAP_NET_ADMIN to attach one to a TCP socket (commit 5d39580f68e6).

#: Of Linux: the option, and its flag for a prefix.
_TCP_MD5SIG_EXT, _PREFIX = 32, 1
#: The addresses whose packets need a key: all of IPv4, all of IPv6, and all of IPv4 at a socket of IPv6.
_IPV4, _IPV6 = struct.pack("H", socket.AF_INET), struct.pack("H", socket.AF_INET6)
_MAPPED = _IPV6 + socket.inet_pton(socket.AF_INET6, "::ffff:0.0.0.0").rjust(22, b"\0")


def close_launcher(rank: int, *, by_script: bool) -> Problem | None:
    """Let the launcher of this rank accept no new connections on this node; returns a warning if ports stay open.

    `rank`: the process id of the rank. MPI of all ranks must have started. `by_script`: the ranks stay MPI processes, which may
    start others, and these connect to the launcher.
    """
    launched = launched_as(rank)
    if launched is None or not launched.launcher.exposes or launched.local_rank not in (0, None):
        return None
    own = "a script that uses MPI itself may start more ranks"
    reason = own if by_script else _close_above(rank, is_first=launched.rank == 0)
    if not reason:
        return None
    return Problem(
        f"the ports of {launched.launcher.name} stay open ({reason}): anyone who reaches one can {launched.launcher.exposes}",
        fix="srun in place of mpirun, `dask-gpu-mpi launch` on one node, or nodes that nobody else reaches",
        what="launcher",
    )


def _close_above(rank: int, *, is_first: bool) -> str:
    """Close the ports of the launcher's processes above a rank; returns why one may be open, empty if none is.

    `is_first`: it is rank 0, which runs on the launcher's own node in most jobs.
    """
    try:
        if psutil.Process(rank).environ().get("PMIX_NAMESPACE", "").startswith("prte-"):
            return "its daemons serve other jobs as well"
        name = ""
        for process in _launcher_above(rank):
            name = process.name()
            _close_ports(process.pid)
    except PermissionError:
        return "this system does not let a rank change them, as with kernel.yama.ptrace_scope=1"
    except (OSError, psutil.Error) as error:
        return f"a rank can't change them: {error}"
    if not name:
        return "its processes can't be seen from a rank"
    return "it runs on another node" if is_first and name in PROXIES else ""


def _close_ports(pid: int) -> None:
    """Give the listening sockets of a process a key; OSError: that is not possible."""
    process = open_process(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed by now
                if not os.readlink(link).startswith("socket:"):
                    continue
                try:
                    fd = descriptor_of(process, int(link.name))
                except OSError as error:
                    if error.errno == errno.EBADF:  # closed since
                        continue
                    raise
                with socket.socket(fileno=fd) as sock:
                    is_network = sock.family in (socket.AF_INET, socket.AF_INET6)
                    if is_network and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        _require_key(sock)
    finally:
        os.close(process)


def _require_key(sock: socket.socket) -> None:
    for address in (_IPV4,) if sock.family == socket.AF_INET else (_IPV6, _MAPPED):
        key = os.urandom(16)
        every = struct.pack("128sBBHi80s", address, _PREFIX, 0, len(key), 0, key)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, every)
