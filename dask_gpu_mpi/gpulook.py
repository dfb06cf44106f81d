"""A rank's look at its GPUs, by a process that ends with it.

NVML leaves 18 MiB of memory in a process that has asked it, also after nvmlShutdown (driver 580), and it may hang. A rank asks
once, so it has a child do it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping

from .errors import DaskGpuMpiError
from .gpus import Gpu
from .inventory import visible_gpus
from .parent import die_with_parent
from .pipes import FrameReader, write_frame

__all__ = ["GpuLook", "may_fork"]

#: Seconds after which the child ends, where nobody is there any more to end it.
LONGEST = 60


def may_fork() -> bool:
    """Whether this process may be forked; what MPI has registered with a network's hardware may not."""
    return sys.platform == "linux" and "mpi4py.MPI" not in sys.modules


class GpuLook:
    """`inventory.visible_gpus`, asked of a child of this process.

    Parameters
    ----------
    environ : mapping
        The environment in which ``CUDA_VISIBLE_DEVICES`` counts.

    Raises
    ------
    OSError
        No process can be had.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        rank = os.getpid()
        # PR_SET_PDEATHSIG follows the thread that forks: only the main thread lives as long as the process.
        follow = threading.current_thread() is threading.main_thread()
        read, write = os.pipe()
        try:
            with warnings.catch_warnings():
                # Python's word about threads: the child takes no lock that one of them may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if self._pid == 0:
            _look(environ, write, rank, follow)
        os.close(write)
        self._fd = read

    def result(self, seconds: float) -> tuple[Gpu, ...] | None:
        """What it has seen; once only.

        Parameters
        ----------
        seconds : float
            To wait for it at most; then it is ended.

        Returns
        -------
        tuple of Gpu or None
            None: it did not answer, or something is wrong, which whoever asks NVML next will be told.
        """
        reader, deadline = FrameReader(self._fd), time.monotonic() + seconds
        found: list[tuple[Gpu, ...]] = []
        while not found and not reader.eof and (left := deadline - time.monotonic()) > 0:
            found = reader.read(left)
        os.close(self._fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        # In the driver it may hang, and nobody is to wait for that.
        with contextlib.suppress(
            RuntimeError
        ):  # no thread can be had: it is collected when this process ends
            threading.Thread(target=_collect, args=(self._pid,), name="NVML", daemon=True).start()
        return found[0] if found else None


def _look(environ: Mapping[str, str], write: int, rank: int, follow: bool) -> None:
    """The child's side: never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)
        if follow:
            die_with_parent(rank)
        # Inside the driver it can't be killed at once, and a launcher waits for the end of the rank's output.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        with contextlib.suppress(DaskGpuMpiError):
            write_frame(write, visible_gpus(environ, own_pid=rank))
    except BaseException:
        pass
    finally:
        os._exit(0)


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
