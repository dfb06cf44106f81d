"""A rank's look at its GPUs, by a child of its agent that ends with it.

NVML leaves 16 MiB of memory in a process that has asked it, also after nvmlShutdown (driver 580), and it may hang. A rank asks
once, so a process of its own does that. The agent forks it in its first moments, when it has one thread and has imported nothing;
the rank can't be forked: a thread of the script's may hold what the child, or a library's handler of forks, waits for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import InputError
from .parent import die_with_parent

if TYPE_CHECKING:
    from .gpus import Gpu

__all__ = ["collect", "start_look"]


def start_look(answer: int, close: Sequence[int]) -> int:
    """Fork a process that writes a frame with what `visibility.visible_gpus` finds, or with what is wrong.

    The frame is ``("seen", gpus)``, ``("input", text)`` of an `InputError`, or ``("failed", text)``.

    Parameters
    ----------
    answer : int
        File descriptor for the frame; closed here.
    close : sequence of int
        File descriptors that the process must not keep.

    Returns
    -------
    int
        Its process id, to be collected.

    Raises
    ------
    OSError
        No process can be had.
    """
    agent, rank = os.getpid(), os.getppid()
    try:
        pid = os.fork()
        if pid == 0:
            _look(answer, close, agent, rank)
    finally:
        os.close(answer)
    return pid


def _look(answer: int, close: Sequence[int], agent: int, rank: int) -> None:
    """The child's side: never returns."""
    try:
        die_with_parent(agent)
        # Inside the driver it can't be killed at once, and a launcher waits for the end of the rank's output.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for fd in close:
            os.close(fd)
        from .pipes import write_frame
        from .visibility import visible_gpus

        found: tuple[str, tuple[Gpu, ...] | str]
        try:
            found = "seen", visible_gpus(os.environ, own_pid=rank)
        except InputError as error:
            found = "input", str(error)
        except Exception as error:
            found = "failed", f"NVML can't be asked: {type(error).__name__}: {error}"
        write_frame(answer, found)
    finally:
        os._exit(0)  # without an answer the rank sees that nobody is there any more


def collect(pid: int) -> None:
    """Wait for the end of that process: without limit, since it may hang inside the driver."""
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        os.waitpid(pid, 0)
