"""The end of a process whose parent has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends (Linux; elsewhere the pipes must do).

    Parameters
    ----------
    parent : int
        Process id of the parent; if it has gone already, this process ends here. 0: live on, from now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)
