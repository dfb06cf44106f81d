"""The GPUs of a rank, queried in a child process.

NVML keeps 16 MiB of memory in a process that has called it, even after nvmlShutdown (driver 580), and it may hang. The agent
forks the child in its first moments, while it has one thread and has imported nothing. The rank can't be forked: a thread of
the script may hold a lock that the child needs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.errors import InputError, StartupError

if TYPE_CHECKING:
    from dask_gpu_mpi.machine import Gpu

#: The time before the start-up deadline at which a rank reports that NVML does not answer: a part of the timeout, between a least
#: and a most. Rank 0, which may have started earlier, must receive the report in time.
NVML_GRACE, LEAST_GRACE, MOST_GRACE = 0.1, 2.0, 15.0

_NO_ANSWER = (
    "the process that queries NVML for the GPUs ended without an answer: NVIDIA's library is broken, or memory is short. "
    "Fix: repair that, leave this node out of the job, or set CUDA_VISIBLE_DEVICES='' to do without GPUs"
)


class Look(FrameReader):
    """Reads the answer of the process of `start_look`, after which its descriptor is closed."""

    def gpus(self, seconds: float) -> tuple[Gpu, ...] | None:
        """The result of `nvidia.visible_gpus`, once; None if it has not come within these seconds.

        Raises the InputError of `visible_gpus`, or a StartupError if NVML or the process has failed.
        """
        frames = self.read(seconds)
        if not frames and not self.eof:
            return None
        self.close()
        answer: tuple[str, Any] = frames[0] if frames else ("failed", _NO_ANSWER)
        kind, found = answer
        if kind == "seen":
            return cast("tuple[Gpu, ...]", found)
        raise InputError(found) if kind == "input" else StartupError(found)


def nvml_grace(timeout: float) -> float:
    """Seconds before the end of a start-up timeout at which a rank stops waiting for NVML."""
    return min(max(NVML_GRACE * timeout, LEAST_GRACE), MOST_GRACE)


def start_look(answer: int, close: Sequence[int], *, rank: int) -> int:
    """Fork a process that calls `nvidia.visible_gpus` and writes the result to the descriptor `answer`; returns its process id.

    The frame is ``("seen", gpus)``, ``("input", text)`` of an `InputError`, or ``("failed", text)``. `answer` is closed here, and
    the descriptors of `close` in the child. `rank` is the process id of the rank, whose own contexts do not count.
    """
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _look(answer, close, parent, rank)
    finally:
        os.close(answer)
    return pid


def _look(answer: int, close: Sequence[int], parent: int, rank: int) -> None:
    """The child's side: never returns."""
    try:
        die_with_parent(parent)
        # A process that hangs in the driver can't be killed, and a launcher waits for the end of the rank's output.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in close:
            os.close(fd)
        from dask_gpu_mpi.machine.nvidia import visible_gpus

        found: tuple[str, tuple[Gpu, ...] | str]
        try:
            found = "seen", visible_gpus(os.environ, own_pid=rank)
        except InputError as error:
            found = "input", str(error)
        except Exception as error:
            found = "failed", f"could not query NVML for the GPUs: {type(error).__name__}: {error}"
        write_frame(answer, found)
    finally:
        os._exit(0)  # the rank reads the end of file if there is no answer


def collect(pid: int) -> None:
    """Wait for the end of that process, which may hang in the driver, without a limit."""
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
        os.waitpid(pid, 0)
