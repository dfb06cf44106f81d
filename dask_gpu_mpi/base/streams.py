"""Standard input, output and error: open where they were closed, flushed in time; and messages that never raise.

All processes of a rank share one standard output, most of the time a pipe or a file.
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

#: Variable by which `launch`, whose standard error is the job's, tells the ranks that others may read that.
PUBLIC = "DGM_PUBLIC_OUTPUT"
#: Processes from a rank to the one that has the job's output.
_MOST_PARENTS = 20


def open_missing() -> None:
    """Put the null device where standard input, output or error is closed (``python SCRIPT >&-``).

    Otherwise a pipe or socket of this package or of Dask gets that number, and a child process writes into it. And Python's own
    streams are None then: None has no `flush`, and `print` takes it for standard output.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free, since those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def print_by_line() -> None:
    """Have this process, and all that are forked from it, print line by line into a pipe or a file, too, as on a terminal.

    So output appears at once, lines of several processes do not mix, and a process that is killed loses half a line at most.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def is_public(environ: Mapping[str, str]) -> bool:
    """Whether others may read standard error, as far as this process can tell: it ends in a file that they can reach and read.

    A rank has a pipe to its launcher, and that may have the file. Below `srun`, and on other nodes than the launcher's, this is
    unknown unless `launch` has passed it on.
    """
    if environ.get(PUBLIC):
        return True
    pid = os.getpid()
    with contextlib.suppress(OSError, ValueError):  # of another user, or no /proc
        for _ in range(_MOST_PARENTS):
            mode = os.stat(f"/proc/{pid}/fd/2").st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                # with an ACL the bits of the group are the mask of all that it lists (acl(5))
                readable = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
                folders = Path(os.readlink(f"/proc/{pid}/fd/2")).parents if readable else ()
                return bool(readable) and all(
                    os.stat(folder).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in folders
                )
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return False


def flush() -> None:
    """Flush standard output and error, before an exit at which Python does not (``os._exit``, ``MPI_Abort``)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk; what a script or task has replaced them by
            stream.flush()


def say(text: str) -> None:
    """Write a message to standard error, since standard output is the script's; never raises."""
    write(sys.stderr, f"dask_gpu_mpi: {text}\n")


def write(stream: Any, text: str) -> None:
    """Write `text` at once, or not at all where the reader is gone.

    Not through Python's own buffer: what can't be written would stay there, and a script that succeeded would exit with code 120.
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


# What a process inherits and others can reach through: its limit of open files, and its working directory.

#: What Linux allows a process where nobody has changed it (``fs.nr_open``). Some containers have a hard limit of 10⁹, and a task
#: may start a program that closes every number below its soft limit, one by one.
MOST = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, for this process and all that it starts.

    The soft limit is 1024 on most systems, for the sake of programs that call ``select()``, which knows no higher numbers. The
    kernel gives the lowest number that is free: such a program minds only if it has more than a thousand files open itself,
    and without this it would have failed by then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def away_from_here() -> Iterator[None]:
    """Load a library in here that reads files of the working directory, where others may have put them. UCX reads ``ucx.conf``,
    whose settings load code and overwrite files. The whole process is elsewhere meanwhile.
    """
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)  # also one that was deleted
    try:
        os.chdir("/")
        yield
    finally:
        with contextlib.suppress(OSError):
            os.fchdir(here)
        os.close(here)


def leave_directory() -> bool:
    """Leave the working directory for good, in this thread alone: others keep it. False: the system does not allow that."""
    clone_fs = 0x200
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(clone_fs):
        return False
    os.chdir("/")
    return True
