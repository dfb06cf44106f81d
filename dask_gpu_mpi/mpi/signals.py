"""SIGTERM and SIGINT, remembered instead of died of, while a rank joins and serves."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from dask_gpu_mpi.base.signals import NUMBERS, Action, install

__all__ = ["Signals", "insist_on", "python_ends", "undisturbed"]


class Signals:
    """Remembers the first of SIGTERM and SIGINT between `take` and `give_back`; only the main thread can take them.

    Attributes
    ----------
    got : tuple or None
        Number of the signal, and when it came (``time.monotonic()``).
    """

    def __init__(self) -> None:
        self.got: tuple[int, float] | None = None
        self._before: list[Action] = []

    def take(self) -> None:
        """Begin."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before.append(install(number, self._remember))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # A warning of the batch system that goes to all ranks; the script, on the client rank, is who can use it.
            # Ignored, and not handled: agents inherit it until they have handlers. One in C (faulthandler's) does no harm.
            action = Action.now(number)
            if not action.in_c:
                self._before.append(action)
                signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        """End: the handlers are what they were."""
        while self._before:
            self._before.pop().restore()

    def _remember(self, number: int, _: Any) -> None:
        if self.got is None:
            self.got = (number, time.monotonic())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No SIGTERM or SIGINT is heard in here, nor what the script hears: a part of the end with a deadline of its own, for which
    other ranks wait. An alarm of the script's may be left, or somebody in a hurry may interrupt twice.
    """
    before: list[Action] = []
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in (*NUMBERS, signal.SIGALRM) if callable(signal.getsignal(number))]
        before = [install(number, lambda *_: None) for number in {signal.SIGTERM, signal.SIGINT, *heard}]
    try:
        yield
    finally:
        for action in before:
            action.restore()


def python_ends() -> bool:
    """Whether the main program has ended: Python waits for threads, or calls what `atexit` has, and drops what they raise."""
    return getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()


def insist_on(code: int) -> None:
    """End this process with that exit code although Python ends already, with another one; the last call counts."""
    libc = ctypes.CDLL(None)
    # Called last of all that Python and MPI do, in this order: the last one registered first.
    with contextlib.suppress(AttributeError):
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(code), None)
        libc.__cxa_atexit(libc.fflush, None, None)
