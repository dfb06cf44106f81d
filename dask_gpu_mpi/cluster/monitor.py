"""The thread that watches the cluster while the script runs in the main thread."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from dask_gpu_mpi.base.signal_actions import LOST, is_ours
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.script import exit_codes
from dask_gpu_mpi.script.dask_client import silence_dask
from dask_gpu_mpi.script.walltime import Walltime
from dask_gpu_mpi.startup.messages import POLL_IDLE

from .member import Member

__all__ = ["Monitor"]

#: Seconds that a script may continue (its `finally`, its `atexit`) after the cluster or the launcher was lost.
LOST_GRACE = 30.0
#: Seconds to let out what a script has printed that is ended by force.
FLUSHING = 1.0


class Monitor:
    """Handles what happens to the client's rank, and ends a script whose cluster is lost."""

    def __init__(self, member: Member, walltime: Walltime) -> None:
        self._member = member
        self._walltime = walltime
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        thread = threading.Thread(target=self._run, name="dask_gpu_mpi monitor", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """End, and wait for that: from then on the main thread handles what happens."""
        self._leaving.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._member.joined.options.shutdown_timeout + 5.0)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            # Whatever it is: without this thread nobody notices the cluster's end any more.
            if not self._leaving.is_set():
                say(f"error: the monitor of the cluster failed: {type(error).__name__}: {error}")
                self._member.ending.lost = self._member.ending.lost or "its monitor failed"
                self._end_the_script()

    def _watch(self) -> None:
        member = self._member
        while not self._leaving.is_set():
            member.pump(POLL_IDLE)
            self._walltime.check()
            if member.ending.state.over:
                member.leave()  # the script continues, maybe for long; the others wait for this rank's workers
            if member.signal_elsewhere is not None:
                self._pass_on_signal(member.signal_elsewhere)
            if member.ending.lost is not None or member.launcher_gone():
                self._end_the_script()
                return

    def _pass_on_signal(self, number: int) -> None:
        """Raise in the script the signal that another rank was sent.

        Not where the script handles it itself, or ignores it: it may have been sent the same signal, which nobody but its handler
        knows. Our own handler ignores the second. Of Python's own of SIGINT the script is still cleaning up then: a launcher
        tells all ranks of Ctrl-C.
        """
        self._member.signal_elsewhere = None
        python_handles_it = signal.getsignal(number) is signal.default_int_handler
        if is_ours(number) or (python_handles_it and not _is_interrupted()):
            os.kill(os.getpid(), number)

    def _end_the_script(self) -> None:
        """Raise ClusterLostError, or SystemExit, in the main thread; a script that swallows it must not keep the job."""
        silence_dask()
        lost = self._member.ending.lost is not None
        # of SIGTERM the script may have a handler, which would end it as if its time had run out
        os.kill(os.getpid(), LOST if lost and is_ours(LOST) else signal.SIGTERM)
        if not self._leaving.wait(LOST_GRACE):
            say(f"script still running {LOST_GRACE:g} s after the cluster was lost; terminating it")
            self._member.channels.drop_agent(1.0)
            with contextlib.suppress(RuntimeError):  # Python ends already
                # In a thread: the script may be inside a print that nobody reads, which holds the stream.
                flushing = threading.Thread(target=flush, daemon=True)
                flushing.start()
                flushing.join(FLUSHING)
            os._exit(exit_codes.FAILED)


def _is_interrupted() -> bool:
    """Whether the script is in an `except` or a `finally` because of a KeyboardInterrupt."""
    raised: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = raised[1] if isinstance(raised, tuple) else raised  # a tuple before Python 3.12
    return isinstance(error, KeyboardInterrupt)
