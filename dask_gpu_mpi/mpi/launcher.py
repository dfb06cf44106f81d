"""The launcher, from its ranks: they end the job through it (`end_job`), and agents close its ports (`close_launcher`)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NoReturn

import psutil

from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.signals import descriptor_of, open_process, sockets_of
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.timeouts import LAUNCHER_PATIENCE, READING
from dask_gpu_mpi.errors import LauncherError, Problem
from dask_gpu_mpi.mpi.neighbours import first_process, kill_rank, launched_as
from dask_gpu_mpi.sites.launchers import detect

#: Process names of launchers that are known to hang.
HANGING = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
#: Processes between such a launcher and the ranks of a node; the first are MPICH's and Intel MPI's.
HYDRAS = ("hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy")
PROXIES = (*HYDRAS, "prted", "orted")

#: Seconds for a command of the batch system to end a step.
ENDING_STEP = 10.0


def end_job(code: int, environ: Mapping[str, str]) -> NoReturn:
    """End this rank, and with it the job, in which other ranks do not respond; `environ`: with the launcher's variables.

    Most launchers end all ranks when one ends with a code other than 0. Hydra reacts to signals only, and srun to neither.
    """
    look_after_launcher()
    flush()
    # In one of ten jobs, MPICH's launcher ended because of an abort before it had printed what this rank had just written.
    wait_until_read((1, 2), READING)
    try:
        launched = detect(environ)
    except LauncherError:
        launched = None
    if launched is not None and (launched.size or 2) > 1:
        if command := launched.launcher.end_command(environ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/", timeout=ENDING_STEP
                )
        if launched.launcher.reacts_to_signals_only:
            kill_rank(os.getpid())
    os._exit(code)


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


def _launcher_above(rank: int) -> Iterator[psutil.Process]:
    """The processes of a launcher above the process `rank` on this node, the nearest first; psutil.Error: the rank has ended."""
    for process in psutil.Process(first_process(rank)).parents():
        name = process.name()
        if name in PROXIES + HANGING:
            yield process
        if name not in PROXIES:  # above its command may be another launcher, of other processes
            return


def report_lost_launcher(rank: int, launcher: int) -> None:
    """Print that the launcher of a rank has ended, by their process ids."""
    say(
        f"error: the launcher of process {rank} on {socket.gethostname()} (process {launcher}) has ended, and this rank with it. "
        "Fix: read its output, or the log of the batch system"
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

    `rank`: its process id. MPI of all ranks must have started. `by_script`: the ranks stay MPI processes, and may start others,
    which connect to the launcher.
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
    by_srun = ", or started the ranks by srun" if name in HYDRAS else ""
    return f"it runs on another node{by_srun}" if is_first and name in PROXIES else ""


def _close_ports(pid: int) -> None:
    """Give the listening sockets of a process a key; OSError: that is not possible."""
    process = open_process(pid)
    try:
        for number, _ in sockets_of(pid):
            try:
                fd = descriptor_of(process, number)
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
