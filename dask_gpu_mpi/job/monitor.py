"""While the script runs in the main thread: the thread that watches its cluster (`Monitor`), and the clock (`Walltime`).

`job.session` makes both. The thread ends a script whose cluster or launcher is lost, and passes on signals that other ranks were
sent. It calls `Walltime.check`, which sends this process a signal in time before the batch system ends the job.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from numbers import Real
from types import FrameType
from typing import Any

from dask_gpu_mpi.base.frames import Held, wait_for_any
from dask_gpu_mpi.base.signals import LOST, action_before, install, is_ours, open_process
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.timeouts import LOST_GRACE
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.dask_client import silence_dask
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.options.convert import show
from dask_gpu_mpi.sites.batch import end_time
from dask_gpu_mpi.startup.messages import Kind

#: Seconds between two checks of the handlers of `on_walltime`, and of descriptors that the script may have closed.
CHECK_HANDLERS, CHECK_DESCRIPTORS = 1.0, 5.0
#: Seconds to flush the output of a script that is ended by force.
FLUSHING = 1.0


class Walltime:
    """The time until the batch system ends the job, and the script's callback before that.

    `environ`: the process's environment at the start. `signal_name`: the option ``walltime_signal``, like ``"USR1"``.
    `on_signal`: the handler of the signals that end this process; it must call `run_callback`.
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
        self._callback: Callable[[], Any] | None = None
        #: When time is short, in seconds since the epoch.
        self._due = math.inf
        #: Whether this process has been sent the signal because time is short.
        self._warned = False
        #: Whether a handler of the script's has replaced ours, of which one warning is enough.
        self._replaced = False

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None if it does not report that."""
        return None if self._end is None else max(0.0, self._end - time.time())

    @functools.cached_property
    def _end(self) -> float | None:
        """Seconds since the epoch; the batch system is queried once."""
        return end_time(self._environ)

    def call_back(self, callback: Callable[[], Any], before: float) -> None:
        """Call `callback` once, `before` seconds before the end or at a signal; see `Session.on_walltime`.

        Raises an InputError if a signal has another handler, and this is not the main thread, which alone can change that; or for
        a wrong argument, of which the script would learn when its time is over.
        """
        if not _needs_no_argument(callback):
            raise InputError(
                f"on_walltime: callback: invalid value {show(callback)}",
                expected="a function without arguments",
            )
        if not isinstance(before, Real) or not before >= 0:
            raise InputError(
                f"on_walltime: before: invalid value {show(before)}", expected="seconds, 0 or more"
            )
        for number in self._numbers:
            if is_ours(number):
                continue
            try:
                install(number, self._on_signal)
            except ValueError:  # from `signal`
                raise InputError(
                    f"on_walltime: called in the thread {threading.current_thread().name!r}, while "
                    f"{signal.Signals(number).name} has another handler",
                    expected="the main thread, which alone can change it",
                    fix="call it in the main thread",
                ) from None
        # First: a signal may come during the query.
        self._callback = callback
        # queries the batch system now, and not when time is short
        self._due = math.inf if self._end is None else self._end - before

    def seconds_until_due(self) -> float:
        """Seconds until `check` is to be called; infinite: it has nothing to do."""
        if self._callback is None:
            return math.inf
        left = math.inf if self._warned else max(0.0, self._due - time.time()) + 0.01
        return min(CHECK_HANDLERS, left)

    def check(self) -> None:
        """Send this process the signal when time is short, and warn if the callback may not run; called from time to time."""
        if self._callback is None:
            return
        replaced = next((number for number in self._numbers if not is_ours(number)), None)
        if replaced is not None and not self._replaced:
            self._replaced = True
            say(
                f"warning: on_walltime: {signal.Signals(replaced).name} got another handler after on_walltime() was called; "
                "the callback runs only if that handler calls the one that it replaced. Fix: set the handler first"
            )
        if not self._warned and time.time() > self._due:
            self._warned = True
            os.kill(os.getpid(), signal.SIGTERM)

    def run_callback(self, number: int, frame: FrameType | None) -> bool:
        """Run the callback, and then the handler that ours replaced; False: there is no callback, or it has run."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        callback()
        handler = action_before(number).handler
        if callable(handler):
            with contextlib.suppress(SystemExit):  # a requeue checks our code
                handler(number, frame)
        return True


class Monitor:
    """The thread that handles the agent's messages while the script runs; see the module's text."""

    def __init__(self, member: Member, walltime: Walltime) -> None:
        self._member = member
        self._walltime = walltime
        self._thread: threading.Thread | None = None
        #: The thread is to end.
        self._leaving = threading.Event()
        #: The thread is to announce that the script cleans up.
        self._announces = False
        #: Written to wake the thread; a signal handler may do that.
        self._wake = Held(-1)
        #: The launcher's process, if there is one; readable when it has ended.
        self._launcher = Held(-1)

    def start(self) -> None:
        """Begin."""
        self._wake = Held(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        thread = threading.Thread(target=self._run, name="dask_gpu_mpi monitor", daemon=True)
        thread.start()
        self._thread = thread  # now: `stop` can't wait for one that could not be started

    def stop(self) -> None:
        """End, and wait for that: from then on the main thread handles the messages."""
        self._leaving.set()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._member.joined.options.shutdown_timeout + 5.0)
        self._wake.close()

    def wake(self) -> None:
        """Let the thread look at what is due."""
        if self._wake.is_ours:
            os.eventfd_write(self._wake.fd, 1)

    def announce_interrupt(self) -> None:
        """Announce to all ranks that the script runs its `finally`; called in signal handlers, which can't send."""
        self._announces = True
        self.wake()

    def _wait(self) -> None:
        """Wait for a message, the end of the launcher, or what is due; nothing is polled for."""
        member = self._member
        # the script may have closed them
        fds = [each.fd for each in (self._wake, self._launcher) if each.is_ours]
        until_due = min(member.agents.seconds_until_due(), self._walltime.seconds_until_due())
        wait_for_any(min(CHECK_DESCRIPTORS, until_due), *fds, member.agents.fd)
        if self._wake.is_ours:
            with contextlib.suppress(OSError):  # it was not woken
                os.eventfd_read(self._wake.fd)

    def _run(self) -> None:
        member = self._member
        with contextlib.suppress(OSError):  # it has ended, or this kernel has no descriptors of processes
            if member.launched:
                self._launcher = Held(open_process(os.getppid()))
        try:
            while not self._leaving.is_set() and self._handle_events():
                self._wait()
        except Exception as error:
            # Any error ends the script: without this thread the cluster's end would not be noticed.
            if not self._leaving.is_set():
                say(f"error: the monitor of the cluster failed: {type(error).__name__}: {error}")
                member.ending.lost = member.ending.lost or "its monitor failed"
                self._end_the_script()
        finally:
            self._launcher.close()

    def _handle_events(self) -> bool:
        """Handle what has happened; False: nothing is left to watch."""
        member = self._member
        member.pump(0.0)
        if self._announces:
            self._announces = False
            member.agents.send(Kind.BUSY)
        self._walltime.check()
        if member.for_script is not None:
            number, member.for_script = member.for_script, None
            self._pass_on_signal(number)
        if self._leaving.is_set():
            return False
        if member.ending.lost is not None or member.launcher_gone():
            self._end_the_script()
            return False
        return not member.ending.stopped or member.agents.fd >= 0

    def _pass_on_signal(self, number: int) -> None:
        """Raise in the script the signal that another rank was sent, unless the script handles or ignores it itself.

        This process may have been sent the same signal, since a launcher sends Ctrl-C to all ranks. Our handler ignores the
        second one. Python's handler of SIGINT does not, so the signal is not raised while the script still cleans up after the
        first. About a handler of the script nothing is known.
        """
        python_handles_it = signal.getsignal(number) is signal.default_int_handler
        if is_ours(number) or (python_handles_it and not _is_interrupted()):
            os.kill(os.getpid(), number)

    def _end_the_script(self) -> None:
        """Raise ClusterLostError, or SystemExit, in the main thread; a script that swallows it must not keep the job."""
        silence_dask()
        lost = self._member.ending.lost is not None
        # the script may have a handler of SIGTERM, which would end it as if its time had run out
        os.kill(os.getpid(), LOST if lost and is_ours(LOST) else signal.SIGTERM)
        if not self._leaving.wait(LOST_GRACE):
            say(f"script still running {LOST_GRACE:g} s after the cluster was lost; terminating it")
            self._member.agents.drop(1.0)
            with contextlib.suppress(RuntimeError):  # Python ends already
                # In a thread, since the script may hang in a print, and holds the stream's lock.
                flushing = threading.Thread(target=flush, daemon=True)
                flushing.start()
                flushing.join(FLUSHING)
            os._exit(outcome.FAILED)


def _is_interrupted() -> bool:
    """Whether the script is in an `except` or a `finally` because of a KeyboardInterrupt."""
    raised: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = raised[1] if isinstance(raised, tuple) else raised  # a tuple before Python 3.12
    return isinstance(error, KeyboardInterrupt)


def _needs_no_argument(callback: object) -> bool:
    """Whether it can be called without arguments, as far as is known."""
    if not callable(callback):
        return False
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # of a function in C
        return True
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in signature.parameters.values()
    )
