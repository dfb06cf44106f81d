"""The GPUs of a rank, probed by a child of its agent that ends with it.

NVML leaves 16 MiB of memory in a process that has asked it, also after nvmlShutdown (driver 580), and it may hang. A rank asks
once, so a process of its own does that. The agent forks it in its first moments, when it has one thread and has imported nothing;
the rank can't be forked: a thread of the script's may hold what the child, or a library's handler of forks, waits for. The
command `plan` has neither script nor agent: it is forked itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.errors import InputError, StartupError

if TYPE_CHECKING:
    from dask_gpu_mpi.machine.gpus import Gpu

__all__ = ["Look", "collect", "hangs", "nvml_grace", "start_look", "start_own_look"]

#: How long before the start-up deadline a rank without an answer of NVML reports that: this part of it, within these seconds.
#: Rank 0, which perhaps started earlier, is to receive it in time.
NVML_GRACE, LEAST_GRACE, MOST_GRACE = 0.1, 2.0, 15.0

#: Why there is no answer where the process that asks NVML is gone.
_NO_ANSWER = (
    "the process that asks NVML for the GPUs ended without an answer: NVIDIA's library is broken, or memory is short. "
    "Fix: repair that, leave this node out of the job, or set CUDA_VISIBLE_DEVICES='' to do without GPUs"
)


class Look:
    """What the process of `start_look` answers.

    Parameters
    ----------
    fd : int
        File descriptor to read its frame from; closed once there is an answer, or by `close`.
    """

    def __init__(self, fd: int) -> None:
        from dask_gpu_mpi.base.frames import FrameReader

        self._reader: FrameReader | None = FrameReader(fd)
        self._seen: tuple[Gpu, ...] | InputError | StartupError | None = None

    def gpus(self, seconds: float) -> tuple[Gpu, ...] | None:
        """The GPUs (`visible_devices.visible_gpus`).

        Parameters
        ----------
        seconds : float
            To wait for it at most.

        Returns
        -------
        tuple of Gpu or None
            None: no answer yet.

        Raises
        ------
        InputError
            As `visible_devices.visible_gpus`.
        StartupError
            NVML can't be asked, or the process that asks has ended.
        """
        deadline = time.monotonic() + seconds
        while self._reader is not None and (left := deadline - time.monotonic()) > 0:
            frames = self._reader.read(left)
            if not frames and not self._reader.eof:
                continue
            self.close()
            answer: tuple[str, Any] = frames[0] if frames else ("failed", _NO_ANSWER)
            kind, found = answer
            if kind == "seen":
                self._seen = found
            else:
                self._seen = InputError(found) if kind == "input" else StartupError(found)
        if isinstance(self._seen, Exception):
            raise self._seen
        return self._seen

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._reader is not None:
            os.close(self._reader.fd)
            self._reader = None


def nvml_grace(timeout: float) -> float:
    """How long before the start-up deadline of so many seconds a rank waits for NVML no longer, in seconds."""
    return min(max(NVML_GRACE * timeout, LEAST_GRACE), MOST_GRACE)


def hangs(where: str) -> StartupError:
    """The error of a rank, ``rank 0 of 2 on host``, whom NVML has not answered in time."""
    return StartupError(
        "NVML did not respond before the start-up timeout (startup_timeout); the NVIDIA driver of this node "
        "probably hangs",
        fix="reset the GPUs or leave this node out of the job, or set CUDA_VISIBLE_DEVICES='' to do without GPUs",
        where=where,
    )


def start_look(answer: int, close: Sequence[int], *, rank: int) -> int:
    """Fork a process that writes a frame with what `visible_devices.visible_gpus` finds, or with what is wrong.

    The frame is ``("seen", gpus)``, ``("input", text)`` of an `InputError`, or ``("failed", text)``.

    Parameters
    ----------
    answer : int
        File descriptor for the frame; closed here.
    close : sequence of int
        File descriptors that the process must not keep.
    rank : int
        Process id of the rank, whose own contexts do not count.

    Returns
    -------
    int
        Its process id, to be collected.

    Raises
    ------
    OSError
        No process can be had.
    """
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _look(answer, close, parent, rank)
    finally:
        os.close(answer)
    return pid


def start_own_look() -> Look:
    """Have a child of this process query NVML, for a command without an agent; before MPI is loaded, which has threads."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # without that process `Look.gpus` raises
        start_look(write, close=[read], rank=os.getpid())
    return Look(read)


def _look(answer: int, close: Sequence[int], parent: int, rank: int) -> None:
    """The child's side: never returns."""
    try:
        die_with_parent(parent)
        # Inside the driver it can't be killed at once, and a launcher waits for the end of the rank's output.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in close:
            os.close(fd)
        from dask_gpu_mpi.base.frames import write_frame
        from dask_gpu_mpi.machine.visible_devices import visible_gpus

        found: tuple[str, tuple[Gpu, ...] | str]
        try:
            found = "seen", visible_gpus(os.environ, own_pid=rank)
        except InputError as error:
            found = "input", str(error)
        except Exception as error:
            found = "failed", f"could not ask NVML for the GPUs: {type(error).__name__}: {error}"
        write_frame(answer, found)
    finally:
        os._exit(0)  # without an answer the rank reads the end of file


def collect(pid: int) -> None:
    """Wait for the end of that process: without limit, since it may hang inside the driver."""
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        os.waitpid(pid, 0)
