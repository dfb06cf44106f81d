"""What a process has from its parent and leaves to its children: standard streams, limits, working directory, environment.

All processes of a rank share one standard output, most of the time a pipe or a file. `say` prints the lines of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Variable by which `launch`, which has the job's standard error, informs the ranks that others may read it.
PUBLIC = "DGM_PUBLIC_OUTPUT"
#: Variable by which `launch` names this run: other runs may use the same log directory.
RUN = "DGM_RUN"
#: Words in the file ``ended``, which a run leaves for `launch`: ranks that the job needs are lost; and the launcher ends the job.
LOST, GONE = "lost", "gone"
#: Processes from a rank to the one that has the job's output.
_MOST_PARENTS = 20


def open_missing() -> None:
    """Open the null device in place of a standard stream that is closed (``python SCRIPT >&-``).

    Otherwise a pipe or socket of this package or of Dask gets its number, and a child process writes to it. Python's own streams
    are None then, which has no `flush`, and which `print` takes for standard output.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # gets the lowest free number, and those below are open by now
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def print_by_line() -> None:
    """Print line by line into a pipe or a file, as on a terminal, in this process and all that are forked from it.

    So output appears at once, lines of several processes do not mix, and a process that is killed loses half a line at most.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def of_run(name: str, environ: Mapping[str, str]) -> str:
    """The name of a file of this run, which another run with the same log directory does not use.

    >>> of_run("ended", {RUN: "5e8f"}), of_run("ended", {})
    ('ended-5e8f', 'ended')
    """
    run = environ.get(RUN, "")
    return f"{name}-{run}" if run.isalnum() else name


def is_public(environ: Mapping[str, str]) -> bool:
    """Whether standard error ends, as far as this process can find out, in a file that others can reach and read.

    A rank has a pipe to its launcher, which may have the file. `launch` sets a variable, for other nodes and below `srun`.
    """
    if environ.get(PUBLIC):
        return True
    pid = os.getpid()
    with contextlib.suppress(OSError, ValueError):  # of another user, or no /proc
        for _ in range(_MOST_PARENTS):
            mode = os.stat(f"/proc/{pid}/fd/2").st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                # with an ACL the bits of the group are the mask of all its entries (acl(5))
                readable = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
                folders = Path(os.readlink(f"/proc/{pid}/fd/2")).parents if readable else ()
                return bool(readable) and all(
                    os.stat(folder).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in folders
                )
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return False


def flush() -> None:
    """Flush standard output and error before an exit at which Python does not (``os._exit``, ``MPI_Abort``)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk, or another object in place of the stream
            stream.flush()


def say(text: str) -> None:
    """Print a message to standard error (standard output is the script's); never raises."""
    write(sys.stderr, f"dask_gpu_mpi: {text}\n")


def write(stream: Any, text: str) -> None:
    """Write `text` at once, or not at all if the reader is gone.

    Text that can't be written would stay in Python's own buffer, and a script that succeeded would exit with code 120.
    """
    original: Any = sys.__stderr__
    with contextlib.suppress(Exception):
        if stream is not original:
            stream.write(text)
            stream.flush()
            return
        with contextlib.suppress(OSError):
            stream.flush()
        data = text.encode(stream.encoding, "backslashreplace")
        while data:
            data = data[os.write(stream.fileno(), data) :]


# What else child processes inherit: limits, the working directory, the environment.

#: Most descriptors that Linux allows a process by default (``fs.nr_open``). Some containers have a hard limit of 10⁹, and a task
#: may start a program that closes every number below its soft limit, one by one.
MOST = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, for this process and all its children.

    The soft limit is 1024 on most systems, for programs that call ``select()``, which supports no higher numbers. The kernel
    gives the lowest free number, so this affects only a program with more than a thousand open files, which failed before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def away_from_here() -> Iterator[None]:
    """Load a library outside of the working directory, in which others may have put files; the whole process leaves it meanwhile.

    UCX for example reads ``ucx.conf``, whose settings load code and overwrite files.
    """
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)  # even if it was deleted
    try:
        os.chdir("/")
        yield
    finally:
        with contextlib.suppress(OSError):
            os.fchdir(here)
        os.close(here)


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and restore the former values at the end."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave_deleted_directory() -> None:
    """Change to / if the working directory was deleted: multiprocessing can't start a process without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def leave_directory() -> bool:
    """Leave the working directory for good, in this thread only. False: the system does not allow that."""
    clone_fs = 0x200
    if ctypes.CDLL(None).unshare(clone_fs):
        return False
    os.chdir("/")
    return True
