"""The end of the batch job, for the script: how much time is left, and its callback."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from dask_gpu_mpi.base.signal_actions import action_before, install, is_ours
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import end_time

__all__ = ["Walltime"]


class Walltime:
    """When the job will be ended, and what the script does before that.

    Parameters
    ----------
    environ : mapping
        The process's environment, as it was at the start.
    signal_name : str or None
        The option ``walltime_signal``, like ``"USR1"``.
    on_signal : callable
        Handler of the signals that tell this process to end; it is to call `run_callback`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        signal_name: str | None,
        on_signal: Callable[[int, FrameType | None], None],
    ) -> None:
        self._environ = environ
        self._numbers = [signal.SIGTERM, *([getattr(signal, f"SIG{signal_name}")] if signal_name else [])]
        self._on_signal = on_signal
        self._asked = False
        #: Seconds since the epoch.
        self._end: float | None = None
        self._callback: Callable[[], Any] | None = None
        self._before = 0.0
        #: Whether this process has been sent the signal because time is short.
        self._warned = False
        #: Whether a handler of the script's has replaced ours, of which one warning is enough.
        self._replaced = False

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None where it does not report that. It is asked once."""
        if not self._asked:
            self._asked = True
            self._end = end_time(self._environ)
        return None if self._end is None else max(0.0, self._end - time.time())

    def call_back(self, callback: Callable[[], Any], before: float) -> None:
        """Have `callback` called once, `before` seconds before the end or at a signal; see `Session.on_walltime`.

        Raises
        ------
        InputError
            A signal has another handler, and this is not the main thread, which alone can change that.
        """
        for number in self._numbers:
            if not is_ours(number):
                self._handle(number)
        self._callback, self._before = callback, before
        self.time_left()  # asks the batch system now, and not when time is short

    def _handle(self, number: int) -> None:
        try:
            install(number, self._on_signal)
        except ValueError:  # from `signal`
            raise InputError(
                f"on_walltime: called in the thread {threading.current_thread().name!r}, while {signal.Signals(number).name} has "
                "another handler (expected the main thread, which alone can change it). Fix: call it in the main thread"
            ) from None

    def check(self) -> None:
        """Called from time to time: send this process the signal when time is short; warn where the callback may not run."""
        if self._callback is None:
            return
        self._check_handlers()
        if not self._warned and self._end is not None and time.time() > self._end - self._before:
            self._warned = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _check_handlers(self) -> None:
        """A callback must never silently not run."""
        for number in self._numbers if not self._replaced else ():
            if not is_ours(number):
                self._replaced = True
                say(
                    f"warning: on_walltime: {signal.Signals(number).name} got another handler after on_walltime() was called; "
                    "the callback runs only if that handler calls the one that it replaced. Fix: set the handler first"
                )

    def run_callback(self, number: int, frame: FrameType | None) -> bool:
        """Run the callback, and the handler that was there before ours; False: there is none, or it has run."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        callback()
        handler = action_before(number).handler
        if callable(handler):
            with contextlib.suppress(SystemExit):  # a requeue tests for our code
                handler(number, frame)
        return True
