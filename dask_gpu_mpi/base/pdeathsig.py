"""The end of a process whose parent has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when the thread that made it ends (Linux; elsewhere the end of a pipe must be enough).

    `parent` is the process id of the parent: where the parent has ended already, this process ends here. 0: no longer.
    `number` is the signal that comes then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number if parent else 0)
    if parent and os.getppid() != parent:
        os._exit(1)
