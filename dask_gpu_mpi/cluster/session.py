"""What the client script holds: the cluster's plan, its address, its credentials, and its end."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.signal_actions import action_before, install, is_ours
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.errors import ClusterLostError, DaskGpuMpiError, InputError
from dask_gpu_mpi.mpi.batch import end_time
from dask_gpu_mpi.mpi.mailbox import abort, before_finalize
from dask_gpu_mpi.options.table import register_defaults
from dask_gpu_mpi.plan.planner import Plan

from . import excepthook, exit_codes
from .bringup import Joined
from .dask_settings import DaskSettings
from .events import BRISK, CALM
from .member import Member

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Session", "announce", "current_session"]

#: Seconds that a script may go on (its `finally`, its `atexit`) after the cluster or the launcher was lost.
LOST_GRACE = 30.0

_current: Session | None = None


class Session:
    """A running cluster, as the client script sees it.

    Attributes
    ----------
    plan : Plan
        Who works where.
    address : str
        The scheduler's.
    dashboard_link : str or None
        URL of the dashboard, as seen from the head rank's host.
    ready_seconds : float
        From the start of this process's work on the cluster until all workers were there.
    """

    def __init__(
        self, member: Member, started: float, on_signal: Callable[[int, FrameType | None], None]
    ) -> None:
        global _current
        go = member.joined.go
        assert go.plan is not None  # the client rank is given it
        self.plan: Plan = go.plan
        self.address: str = go.address
        self.dashboard_link: str | None = go.dashboard
        self.ready_seconds: float = time.monotonic() - started
        self._config = go.config
        self._member = member
        self._started = started
        self._closed = False
        self._finished = False
        self._leaving = threading.Event()
        self._monitor: threading.Thread | None = None
        self._asked = False
        self._end: float | None = None
        self._callback: Callable[[], Any] | None = None
        self._before = 0.0
        self._warned = False
        self._on_signal_handler = on_signal
        self._replaced = False
        self._settings: DaskSettings | None = None
        self._silenced: list[logging.Logger] = []
        _current = self

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<Session {self.address} workers={len(self.plan.workers)} hosts={len(self.plan.hosts)} {state}>"
        )

    @property
    def closed(self) -> bool:
        """Whether the cluster has been ended."""
        return self._closed

    @property
    def security(self) -> Any:
        """The ``distributed.Security`` that lets a client in; None without TLS."""
        from distributed import Security

        if not self.address.startswith("tls://"):
            return None
        import dask

        with dask.config.set(self._config):
            return Security()

    def client(self, **kwargs: Any) -> Client:
        """A new ``distributed.Client`` of this cluster; keywords are passed on."""
        from distributed import Client

        security = self.security
        if security is not None:
            kwargs.setdefault("security", security)
        return Client(self.address, **kwargs)

    def close(self) -> None:
        """End the cluster; the script goes on. May be called again."""
        if not self._closed:
            self._closed = True
            self._stop_monitor()
            _close_clients(self.address)
            self._member.client_done(final=self._member.leave_open)
            self._give_back()

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None where it does not tell."""
        if not self._asked:
            self._asked = True
            self._end = end_time(self._member.joined.environ)
        return None if self._end is None else max(0.0, self._end - time.time())

    def on_walltime(self, callback: Callable[[], Any], before: float = 120.0) -> None:
        """Have `callback` called once, in time before the job is ended; then the job ends with exit code 75.

        It is called in the main thread, between two steps of the script, `before` seconds before the walltime where the batch
        system tells it, or when the job is sent SIGTERM (or the signal that ``walltime_signal`` names), whichever comes first.
        Afterwards SystemExit(75) is raised there, so that the script's `finally` and `atexit` run; a requeue tests for 75.

        It is called in this process only, not in those that the script forks.

        From this call on these signals are handled here, also where they were ignored. A handler that was there before, of the
        script or of a library, is called after `callback`; if it raises SystemExit, the code is still 75. A handler that is set
        after this call replaces it (a warning on standard error says so): set handlers first.

        Parameters
        ----------
        callback : callable
            Writes the checkpoint; takes no arguments. The cluster still works while it runs.
        before : float
            Seconds before the end.

        Raises
        ------
        InputError
            A signal has another handler, and this is not the main thread, which alone can change that.
        """
        for number in self._end_signals():
            if not is_ours(number):
                self._handle(number)
        self._callback, self._before = callback, before
        self.time_left()  # asks the batch system now, and not when time is short

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Let a plain ``Client()`` find the cluster, and watch over it while the script runs."""
        # First: distributed registers its defaults on import, which would win over those registered here.
        import distributed  # noqa: F401

        register_defaults()
        _shut_down_once()
        self._settings = DaskSettings({"scheduler-address": self.address, **self._config})
        _hook_finalize()
        monitor = threading.Thread(target=self._watch, name="dask_gpu_mpi monitor", daemon=True)
        monitor.start()
        self._monitor = monitor

    def _end_signals(self) -> list[int]:
        """Those that tell this process to end."""
        name = self._member.joined.options.walltime_signal
        return [signal.SIGTERM, *([getattr(signal, f"SIG{name}")] if name else [])]

    def _handle(self, number: int) -> None:
        try:
            install(number, self._on_signal_handler)
        except ValueError:  # from `signal`
            raise InputError(
                f"on_walltime: called in the thread {threading.current_thread().name!r}, while {signal.Signals(number).name} has "
                "another handler (expected the main thread, which alone can change it). Fix: call it in the main thread"
            ) from None

    def _look_for_other_handlers(self) -> None:
        """A callback must never silently not run."""
        if self._callback is None or self._replaced:
            return
        for number in self._end_signals():
            if not is_ours(number):
                self._replaced = True
                say(
                    f"warning: on_walltime: {signal.Signals(number).name} got another handler after on_walltime() was called; "
                    "the callback runs only if that handler calls the one that it replaced. Fix: set the handler first"
                )

    def _give_back(self) -> None:
        """The script goes on without the cluster: its process is what it was before."""
        if self._settings is not None:
            self._settings.take_back()
        for logger in self._silenced:
            logger.disabled = False
        # An error of ours that is under way, through a `finally` perhaps, still needs it.
        if self._member.ending.lost is None and not isinstance(sys.exception(), DaskGpuMpiError):
            excepthook.retire()

    def _watch(self) -> None:
        try:
            self._watch_over()
        except Exception as error:
            # Whatever it is: without this thread nobody hears of the cluster's end any more.
            if not self._leaving.is_set():
                say(f"error: the monitor of the cluster failed: {type(error).__name__}: {error}")
                self._member.ending.lost = self._member.ending.lost or "its monitor failed"
                self._end_the_script()

    def _watch_over(self) -> None:
        member = self._member
        while not self._leaving.is_set():
            member.pump(CALM)
            self._look_for_other_handlers()
            if member.ending.state.over:
                member.leave()  # the script goes on, maybe for long; the others wait for this rank's workers
            due = self._callback is not None and self._end is not None and not self._warned
            if due and time.time() > (self._end or 0.0) - self._before:
                self._warned = True
                os.kill(os.getpid(), signal.SIGTERM)
            if member.ending.lost is not None or member.launcher_gone():
                self._end_the_script()
                return

    def _end_the_script(self) -> None:
        """Raise ClusterLostError, or SystemExit, in the main thread."""
        _silence_dask()
        os.kill(os.getpid(), signal.SIGTERM)
        self._end_by_force_after(LOST_GRACE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: the job is to end. Always raises."""
        self._member.busy = True
        if self._member.ending.lost is not None:
            raise ClusterLostError(self._member.ending.lost, reported=True)
        callback, self._callback = self._callback, None
        if callback is None:
            raise SystemExit(exit_codes.of_signal(number))
        callback()
        handler = action_before(number).handler
        if callable(handler):
            with contextlib.suppress(SystemExit):  # a requeue tests for our code
                handler(number, frame)
        raise SystemExit(exit_codes.WALLTIME)

    def _end_by_force_after(self, seconds: float) -> None:
        """The script is being ended by an exception; one that swallows it must not keep the job."""
        if not self._leaving.wait(seconds):
            say(f"the script goes on {seconds:g} s after its cluster was lost: it is ended")
            self._member.post.drop_agent(1.0)
            os._exit(exit_codes.FAILED)

    def _stop_monitor(self) -> None:
        self._leaving.set()
        if self._monitor is not None and self._monitor is not threading.current_thread():
            self._monitor.join(timeout=self._member.joined.options.shutdown_timeout + 5.0)

    def _hear_why(self) -> None:
        """The scheduler's death may be why the script has failed; its client knows it a moment before the agent does."""
        limit = time.monotonic() + 1.0
        self._member.pump(0.0)
        self._member.pump(0.0)  # what the first has heard this rank tells itself
        while _lost_clients() and not self._member.ending.state.over and time.monotonic() < limit:
            self._member.pump(BRISK)

    def _finish(self) -> None:
        """The script is over, whichever way: the very last thing. Starts no thread (Python 3.12.0 to 3.12.2 can't any more)."""
        if self._finished:
            return
        self._finished = True
        try:
            self._end_the_job()
        except BaseException:
            # The other ranks have not been told, and would wait for this one for ever.
            say(f"error: this rank could not end the cluster: the job is aborted\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):
                abort(exit_codes.FAILED)
            flush()
            os._exit(exit_codes.FAILED)

    def _end_the_job(self) -> None:
        self._stop_monitor()
        if not self._closed:
            self._hear_why()
        self._silenced = _silence_dask()
        _close_clients(self.address)
        self._closed = True
        self._member.client_done(final=True)
        _give_up_clients(self.address)
        say(f"ended after {time.monotonic() - self._started:.1f} s")
        if self._member.launcher_gone() or self._member.descriptors_lost:
            flush()
            os._exit(exit_codes.FAILED)  # MPI can't be left in an orderly way


@functools.cache
def _hook_finalize() -> None:
    """End the cluster when the script calls ``MPI.Finalize()``: the other ranks don't call it before that."""
    before_finalize(lambda: _current._finish() if _current is not None else None)


def _disown() -> None:
    """In a child that the script has forked: the cluster is the parent's, and so are the threads that hold any lock of ours."""
    session = _current
    if session is not None:
        session._closed = session._finished = True
        # What Dask does with them at the end of a process waits for their event loop, which is not here.
        _give_up_clients(session.address)


os.register_at_fork(after_in_child=_disown)


def _silence_dask() -> list[logging.Logger]:
    """The cluster is over, and we have said so: what Dask's clients here then complain about is no news."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("distributed.")]
    loggers = [logging.getLogger(name) for name in ("distributed", *names)]
    silenced = [logger for logger in loggers if not logger.disabled]
    for logger in silenced:
        logger.disabled = True
    return silenced


def _close_clients(address: str) -> None:
    """Close the script's clients of this cluster while the scheduler is still there to answer."""
    module = sys.modules.get("distributed.client")
    if module is None:
        return
    for client in list(module.Client._instances):
        try:
            if (
                not client.asynchronous
                and client.status == "running"
                and client.scheduler is not None
                and client.scheduler.address == address
            ):
                client.close(timeout=1)
        except Exception:
            pass


def _lost_clients() -> bool:
    """Whether a client has lost its scheduler, and seeks it."""
    module = sys.modules.get("distributed.client")
    return module is not None and any(
        client.status == "connecting" for client in list(module.Client._instances)
    )


def _give_up_clients(address: str) -> None:
    """Mark clients that could not be closed as closed.

    ``Client.__del__`` closes what is not, and waits for it for ever once the interpreter ends and its event loop is gone. Such
    are those whose ``shutdown()`` or ``close()`` has failed half way.
    """
    module = sys.modules.get("distributed.client")
    for client in list(module.Client._instances) if module is not None else ():
        with contextlib.suppress(Exception):
            ours = client.scheduler is not None and client.scheduler.address == address
            if client.status == "closing" or (ours and client.status != "closed"):
                client.status = "closed"


def _shut_down_once() -> None:
    """Let ``Client.shutdown()`` do nothing on a client that is closed, instead of failing with errors from its inside.

    A script that ends its cluster twice, by this and by `Session.close`, is right.
    """
    from distributed import Client

    shutdown = Client.shutdown
    if getattr(shutdown, "once", False):
        return

    @functools.wraps(shutdown)
    def once(self: Client) -> Any:
        if self.status == "closed" and not self.asynchronous:
            return None
        return shutdown(self)

    once.once = True  # type: ignore[attr-defined]
    Client.shutdown = once  # type: ignore[method-assign]


def announce(joined: Joined, seconds: float) -> None:
    """Say what came up, and where the dashboard is."""
    plan = joined.go.plan
    assert plan is not None  # called on the client rank, which is given it
    gpus = sum(worker.kind == "gpu" for worker in plan.workers)
    workers, hosts = len(plan.workers), len(plan.hosts)
    counts = [
        f"{number} {noun}{'s' * (number != 1)}"
        for number, noun in ((workers, "worker"), (hosts, "host"), (gpus, "GPU"))
    ]
    say(f"{counts[0]} on {counts[1]}, {counts[2]}, ready after {seconds:.1f} s")
    for warning in (*joined.options.warnings, *plan.warnings):
        say(f"warning: {warning}")
    if joined.go.dashboard:
        say(f"dashboard at {joined.go.dashboard}")


def current_session() -> Session | None:
    """The last session of this process; None before `initialize` and on other ranks."""
    return _current
