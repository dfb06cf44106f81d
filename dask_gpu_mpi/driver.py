"""A process that has the CUDA driver initialised while those of the workers come up.

The first process on a host to call ``cuInit`` waits for the driver to bring up its GPUs, even in persistence mode; while one has
it, the others wait for a tenth of that. Neither the rank nor its agent can be that one: of CUDA, nothing works in what a process
forks after ``cuInit``, and all workers are forked. So a process of its own does it while the agent imports, makes no context, and
ends when the workers are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Mapping, Sequence

from .forkserver import die_with_parent

__all__ = ["Driver", "may_be_kept_up"]

#: Seconds after which it ends in any case: nothing but the start wants it.
LONGEST = 120.0
#: Where MPS listens by default.
MPS = "/tmp/nvidia-mps"


def may_be_kept_up(environ: Mapping[str, str]) -> bool:
    """Whether there is nothing to be said against it: with MPS ``cuInit`` starts a server, which others take for a stranger's."""
    return "CUDA_MPS_PIPE_DIRECTORY" not in environ and not os.path.exists(MPS)


class Driver:
    """The process that has called ``cuInit``.

    Call it from the main thread, before any other is started.

    Parameters
    ----------
    close : sequence of int
        File descriptors that it must not keep (the pipes by which others see this process die).

    Raises
    ------
    OSError
        No pipe or no process can be had.

    Attributes
    ----------
    descriptor : int
        It ends when nobody has this open any more: for children to close.
    """

    def __init__(self, close: Sequence[int]) -> None:
        read, self.descriptor = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                for descriptor in (self.descriptor, *close):
                    os.close(descriptor)
                # Inside the driver it can't be killed at once, and a launcher waits for the end of these two.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                with contextlib.suppress(OSError, AttributeError):  # the workers will say what is wrong
                    ctypes.CDLL("libcuda.so.1").cuInit(0)
                select.select([read], [], [], LONGEST)
            finally:
                os._exit(0)
        os.close(read)
        self._pid: int | None = pid

    def release(self) -> None:
        """Let it end; again: nothing."""
        if self._pid is None:
            return
        pid, self._pid = self._pid, None
        os.close(self.descriptor)
        # In the driver it may hang, and nobody is to wait for that.
        threading.Thread(target=_collect, args=(pid,), name="CUDA driver", daemon=True).start()


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
