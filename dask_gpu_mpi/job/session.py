"""What the client script holds: the cluster's plan, its address, its credentials, and its end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.errors import ClusterLostError, DaskGpuMpiError, InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.announcement import all_warnings, gpu_count
from dask_gpu_mpi.job.child_processes import ChildrenOfCluster
from dask_gpu_mpi.job.dask_client import (
    DaskSettings,
    abandon_clients,
    close_clients,
    has_lost_client,
    made_client,
    prefer_cluster,
    shuffle_settings,
    shut_down_once,
    silence_dask,
)
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.job.monitor import Monitor, Walltime
from dask_gpu_mpi.job.outcome import Outcome
from dask_gpu_mpi.mpi.library import abort, before_finalize
from dask_gpu_mpi.mpi.signals import python_ends, undisturbed
from dask_gpu_mpi.network.credentials import link_template
from dask_gpu_mpi.options.resolve import register_defaults
from dask_gpu_mpi.plan.plan import Plan

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpu_mpi.job.report import Reporter

__all__ = ["Session", "current_session"]

#: Seconds to find out why a client has lost its scheduler.
REASON_TIMEOUT = 1.0

_current: Session | None = None


class _Use(Enum):
    """What the script has made of its session."""

    OPEN = "it has its cluster"
    CLOSED = "it has closed it, and continues; the other ranks wait for its end"
    ENDED = "it has closed it, and continues, as all ranks do: nothing is left to do at its end"
    FINISHED = "it is over; or this is a child that it has forked, whose the cluster is not"


class Session:
    """A running cluster, as the client script sees it.

    Attributes
    ----------
    plan : Plan
        Who works where.
    address : str
        The scheduler's.
    dashboard_link : str or None
        URL of the dashboard, as seen from rank 0's host.
    ready_seconds : float
        From the start of this process's work on the cluster until all workers were there.
    """

    def __init__(
        self, member: Member, started: float, on_signal: Callable[[int, FrameType | None], None]
    ) -> None:
        global _current
        cluster, options = member.joined.cluster, member.joined.options
        assert cluster.plan is not None  # the client rank is given it
        self.plan: Plan = cluster.plan
        self.address: str = cluster.address
        self.dashboard_link: str | None = cluster.dashboard
        self.ready_seconds: float = time.monotonic() - started
        self._config = cluster.config
        self._member = member
        self._started = started
        self._use = _Use.OPEN
        self._owner = os.getpid()
        self._walltime = Walltime(member.joined.environ, options.walltime_signal, on_signal)
        self._monitor = Monitor(member, self._walltime)
        self._reporter: Reporter | None = None
        self._settings: DaskSettings | None = None
        self._children: ChildrenOfCluster | None = None
        self._silenced: list[logging.Logger] = []
        self._client: Client | None = None
        self._lock = threading.Lock()
        _current = self

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<Session {self.address} workers={len(self.plan.workers)} hosts={len(self.plan.hosts)} {state}>"
        )

    def _repr_html_(self) -> str:
        """The card that Jupyter shows."""
        from dask_gpu_mpi.job.announcement import Card

        plan = self.plan
        return Card(
            address=self.address,
            closed=self.closed,
            nodes=tuple(host.host for host in plan.hosts),
            gpus=gpu_count(plan),
            workers=len(plan.workers),
            dashboard=self.dashboard_link,
            seconds_left=None if self.closed else self.time_left(),
        ).html()

    @property
    def closed(self) -> bool:
        """Whether the cluster has been ended."""
        return self._use is not _Use.OPEN

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
        """End the cluster; the script continues. May be called again."""
        if not self.closed:
            self._use = _Use.CLOSED
            final = self._member.leave_open
            # From the last to the first, each whatever those before it raise: a Ctrl-C, for example.
            with contextlib.ExitStack() as steps:
                steps.callback(self._give_back)
                steps.callback(self._finish_report)
                steps.callback(self._member.client_done, final=final)
                steps.callback(close_clients, self.address)
                steps.callback(self._begin_report, fetch=True)
                steps.callback(self._warn_if_unused)
                self._monitor.stop()
            if final:
                self._use = _Use.ENDED
                self._over()

    def spmd(
        self,
        fn: Callable[..., Any],
        *args: Any,
        workers: Sequence[Any] | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        grace: float = 5.0,
    ) -> list[Any]:
        """Run ``fn(group, *args)`` at the same time on every chosen worker, on all or on none.

        As `dask_gpu_mpi.spmd`, which tells of the arguments and errors, with the script's client, or one of the session's own.

        Examples
        --------
        >>> session.spmd(lambda group: (group.rank, group.hosts[group.rank]))  # doctest: +SKIP
        [(0, 'node1'), (1, 'node1'), (2, 'node2'), (3, 'node2')]
        """
        from dask_gpu_mpi.gang.spmd import spmd

        if self.closed:
            raise InputError("spmd: the cluster of this session has ended (expected a session that is open)")
        limits = {"workers": workers, "timeout": timeout, "start_timeout": start_timeout, "grace": grace}
        results: list[Any] = spmd(self._own_client(), fn, *args, **limits)  # type: ignore[arg-type]
        return results

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None where it does not report that."""
        return self._walltime.time_left()

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
        self._walltime.call_back(callback, before)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write what the job has done until now: FILE.html is one page for a browser, FILE.json its figures (docs/report.md).

        Without the option `report`, tasks and measurements are recorded from the first call on.

        Raises
        ------
        InputError
            It has another ending, can't be written there, or bokeh is not installed; or this process was forked by the script.
        OSError
            It can't be written.
        TimeoutError
            The scheduler does not answer; nothing is written.
        """
        from dask_gpu_mpi.view.report_file import check_report

        if os.getpid() != self._owner:
            raise InputError(
                "session.report: called in a process that the script has forked (expected the script's own). Fix: call it there"
            )
        path = os.fspath(path)
        check_report(path, f"rank {self._member.rank} on {self._member.joined.host}")
        running = ("the script runs", None) if not self.closed else self._outcome()
        reporter = self._make_reporter()
        reporter.write_now(path, running, ask=not self.closed)
        if self._use in (_Use.ENDED, _Use.FINISHED):
            reporter.close()  # nothing else does any more

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------------------

    def _own_client(self) -> Client:
        """The script's present client of this cluster, or one that lives as long as the session."""
        from distributed import Client

        with contextlib.suppress(ValueError):  # there is none
            present: Client = Client.current()
            if (
                present.scheduler is not None
                and present.scheduler.address == self.address
                and not present.asynchronous
            ):
                return present
        with self._lock:
            if self._client is None or self._client.status != "running":
                self._client = self.client(set_as_default=False)
            return self._client

    def _open(self) -> None:
        """Let a plain ``Client()`` find the cluster, and watch over it while the script runs."""
        # First: distributed registers its defaults on import, which would win over those registered here.
        import distributed  # noqa: F401

        register_defaults()
        shut_down_once(self._fetch_record)
        prefer_cluster(self.address)
        settings = {"scheduler-address": self.address, **self._config, **self._link_config()}
        # in the cluster of another job there are workers that this plan does not have
        if self._member.joined.options.scheduler:
            settings |= shuffle_settings(self.plan)
        self._settings = DaskSettings(settings)
        self._children = ChildrenOfCluster(settings)
        # When the script calls MPI.Finalize(); the other ranks don't call it before that. What is set last, after the mailbox's
        # own, is called first.
        before_finalize(self._finish)
        self._monitor.start()
        if self._member.joined.options.report is not None:
            self._make_reporter()

    def _link_config(self) -> dict[str, Any]:
        """What ``Client.dashboard_link`` of the script, its pages and its children are made of."""
        import dask

        if not self._member.joined.options.scheduler:
            return {}  # the dashboard of another job
        template: str = dask.config.get("distributed.dashboard.link")
        return {"distributed.dashboard.link": link_template(self.dashboard_link or "", template)}

    def _make_reporter(self) -> Reporter:
        if self._reporter is None:
            from dask_gpu_mpi.job.report import Reporter

            now = time.time()
            began = now - (time.monotonic() - self._started)
            warnings = all_warnings(self._member.joined)
            self._reporter = Reporter(
                self._member.joined, self.security, warnings, started=began, ready=began + self.ready_seconds
            )
        return self._reporter

    def _fetch_record(self) -> None:
        """The cluster is about to end: what its scheduler knows has to be asked for now."""
        if self._reporter is not None and not self.closed:
            self._reporter.fetch(last=True)

    def _begin_report(self, *, fetch: bool) -> None:
        """Make the report, where the user wants one, while the cluster ends."""
        path = self._member.joined.options.report
        if self._reporter is not None and path is not None:
            lost = self._member.ending.lost is not None
            self._reporter.begin(path, self._outcome(), fetch=fetch and not lost, lost=lost)

    def _finish_report(self) -> None:
        if self._reporter is not None:
            self._reporter.finish()

    def _outcome(self) -> Outcome:
        """How the job ends."""
        if (lost := self._member.ending.lost) is not None:
            return f"the cluster was lost: {lost}", outcome.FAILED
        # a function of `execute` that raises
        if (error := sys.exception()) is not None:
            return outcome.outcome_of_error(error)
        if (noted := outcome.noted()) is not None:
            return noted
        if self._use is _Use.CLOSED:
            return "the session was closed; the script continues", None
        return "the script ended", None

    def _give_back(self) -> None:
        """The script continues without the cluster: its process is what it was before."""
        prefer_cluster(None)
        if self._settings is not None:
            self._settings.take_back()
        if self._children is not None:
            self._children.release()
        for logger in self._silenced:
            logger.disabled = False
        # A DaskGpuMpiError that is being raised, through a `finally` perhaps, still needs it.
        if self._member.ending.lost is None and not isinstance(sys.exception(), DaskGpuMpiError):
            outcome.retire()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: the job is to end. Always raises."""
        self._member.busy = True
        if self._member.ending.lost is not None:
            raise ClusterLostError(self._member.ending.lost, reported=True)
        called = self._walltime.run_callback(number, frame)
        code = outcome.WALLTIME if called else outcome.code_of_signal(number)
        end = outcome.SignalExit(number, code)
        # The script may catch it, and end with another code; once Python ends, it can't.
        outcome.note((end.outcome[0], code if python_ends() else None))
        raise end

    def _await_reason(self) -> None:
        """The scheduler's death may be why the script has failed; its client knows it a moment before the agent does."""
        member = self._member
        member.pump(0.0)
        member.pump(0.0)  # this rank's messages to itself, from the first
        member.pump_until(
            lambda: member.ending.state.over or not has_lost_client(), time.monotonic() + REASON_TIMEOUT
        )

    def _has_finished(self) -> bool:
        return self._use is _Use.FINISHED

    def _finish(self) -> None:
        """The script is over, whichever way: the very last thing. Starts no thread (Python 3.12.0 to 3.12.2 can't any more)."""
        if self._use in (_Use.ENDED, _Use.FINISHED) or os.getpid() != self._owner:
            return
        had_cluster, self._use = not self.closed, _Use.FINISHED
        try:
            with undisturbed():
                self._end_the_job(had_cluster)
        except BaseException:
            # The other ranks do not know, and would wait for this one for ever.
            say(f"error: this rank could not end the cluster; aborting the job\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):
                abort(outcome.FAILED)
            flush()
            os._exit(outcome.FAILED)

    def _end_the_job(self, had_cluster: bool) -> None:
        self._monitor.stop()
        if self._children is not None:
            self._children.release()
        if had_cluster:
            self._await_reason()
            self._warn_if_unused()
        self._silenced = silence_dask()
        self._begin_report(fetch=had_cluster)
        close_clients(self.address)
        self._member.client_done(final=True, code=self._outcome()[1] or outcome.failure() or 0)
        self._finish_report()
        self._over()
        if self._member.launcher_gone() or self._member.descriptors_lost:
            flush()
            os._exit(outcome.FAILED)  # MPI can't be left in an orderly way

    def _warn_if_unused(self) -> None:
        """A script that has come to a good end without the cluster may not know that it has not used it."""
        member = self._member
        code = self._outcome()[1]
        # not known after a signal, nor after sys.exit() in a script with initialize()
        ended_well = code == 0 or (code is None and outcome.noted() is None)
        if ended_well and member.joined.options.scheduler and not (made_client() or member.had_client):
            say(
                "warning: no client has connected to the cluster, and its workers have done nothing; compute() without a client "
                "runs in the script's own process. Fix: client = Client() before the first compute()"
            )

    def _over(self) -> None:
        """Nothing of the cluster is left, for this process to end either."""
        abandon_clients(self.address)
        if self._reporter is not None:
            self._reporter.close()
        atexit.unregister(self._finish)
        say(f"ended after {time.monotonic() - self._started:.1f} s")


def _disown() -> None:
    """In a child that the script has forked: the cluster is the parent's, and so are the threads that hold any lock of ours."""
    session = _current
    if session is not None:
        session._use = _Use.FINISHED
        # What Dask does with them at the end of a process waits for their event loop, which is not here.
        abandon_clients(session.address)


os.register_at_fork(after_in_child=_disown)


def current_session() -> Session | None:
    """The last session of this process; None before `initialize` and on other ranks."""
    return _current
