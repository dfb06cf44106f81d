"""What a process inherits and others can reach through: its limit of open files, and its working directory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator

__all__ = ["MOST", "away_from_here", "leave_directory", "raise_descriptor_limit"]

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
