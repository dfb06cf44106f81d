"""The cluster in the process of the script: `Session` is the user's object, and `ScriptCluster` all that is behind it.

`job.start` makes both when the cluster is up. The cluster ends by `Session.close`, by a signal (`ScriptCluster.interrupt`), or at
the end of the process (`ScriptCluster.end`), whichever is first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dask_gpu_mpi.base.signals import undisturbed
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.timeouts import REASON_TIMEOUT
from dask_gpu_mpi.errors import ClusterLostError, DaskGpuMpiError, InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.announcement import all_warnings, card
from dask_gpu_mpi.job.child_processes import cluster_for_children
from dask_gpu_mpi.job.dask_client import (
    DaskSettings,
    DaskUse,
    abandon_clients,
    close_clients,
    has_lost_client,
    prefer_cluster,
    prefer_no_cluster,
    security_of,
    shuffle_settings,
    silence_dask,
)
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.job.monitor import Monitor, Walltime
from dask_gpu_mpi.job.outcome import Outcome
from dask_gpu_mpi.network.credentials import link_template
from dask_gpu_mpi.options.resolve import register_defaults
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.workers.worker_options import follow_cudf_spill

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpu_mpi.job.report import Reporter


class State(Enum):
    """How far the end of the script's cluster has come."""

    OPEN = "the cluster runs"
    CLOSED = "the script has closed the cluster, and continues; the other ranks wait for the script's end"
    ENDED = "nothing is left to end, or this is a forked child that does not own the cluster"


class ScriptCluster:
    """The cluster as the script's process has it: the changes that let `Client()` find it, and the end of both, in any case."""

    def __init__(
        self,
        member: Member,
        started: float,
        on_signal: Callable[[int, FrameType | None], None],
        *,
        quiet: bool = False,
    ) -> None:
        global _script_cluster
        self.member = member
        #: The user's object, once there is one.
        self.session: Session | None = None
        self.walltime = Walltime(member.joined.environ, member.joined.options.walltime_signal, on_signal)
        self.ready_seconds = time.monotonic() - started
        self.state = State.OPEN
        #: The process that owns the cluster; a child that it forks has a copy of this object.
        self.owner = os.getpid()
        self._address = member.joined.cluster.address
        self._started = started
        self._quiet = quiet
        self._monitor = Monitor(member, self.walltime)
        self._reporter: Reporter | None = None
        #: Set by `open`.
        self._use: DaskUse | None = None
        #: Restores the process: the script continues without the cluster.
        self._undo = contextlib.ExitStack()
        _script_cluster = self

    @property
    def closed(self) -> bool:
        """Whether the script has ended the cluster."""
        return self.state is not State.OPEN

    @property
    def over(self) -> bool:
        """Whether the cluster has been ended, by the script or otherwise, as by a client's ``shutdown()``."""
        shut_down = self._use is not None and self._use.is_shut_down  # of which the hub hears a moment later
        return self.closed or shut_down or self.member.ending.stopped

    def open(self) -> None:
        """Let a plain ``Client()`` find the cluster, and watch it while the script runs."""
        # First, since distributed registers its defaults on import, which would replace those registered here.
        import distributed  # noqa: F401, I001
        import dask

        register_defaults(dask.config)
        follow_cudf_spill(self.member.joined.options.worker_options)
        cluster, options = self.member.joined.cluster, self.member.joined.options
        self._use = prefer_cluster(self._address, self._fetch_record)
        self._undo.callback(prefer_no_cluster)
        settings = {"scheduler-address": cluster.address, **cluster.config}
        # The cluster of another job has another dashboard, and workers that are not in this plan.
        if options.scheduler:
            template = dask.config.get("distributed.dashboard.link")
            settings["distributed.dashboard.link"] = link_template(cluster.dashboard or "", template)
            assert cluster.plan is not None  # the client rank is given it
            settings |= shuffle_settings(cluster.plan)
        self._undo.callback(DaskSettings(settings).take_back)
        self._undo.enter_context(cluster_for_children(settings))
        self._monitor.start()
        if options.recorded:
            self._make_reporter()

    def close(self) -> None:
        """End the cluster; the script continues. May be called again."""
        if self.closed:
            return
        self.state = State.CLOSED
        self._end(had_cluster=True, final=self.member.leave_open)
        if self.member.leave_open:
            self.state = State.ENDED

    def end(self) -> None:
        """End the job after the script, as the last step. Starts no thread, since Python 3.12.0 to 3.12.2 can't any more."""
        if self.state is State.ENDED or os.getpid() != self.owner:
            return
        had_cluster, self.state = not self.closed, State.ENDED
        try:
            with undisturbed():
                self._end(had_cluster=had_cluster, final=True)
            if self.member.launcher_gone():
                flush()
                os._exit(outcome.FAILED)
        except BaseException:
            # This rank's agent notices its end: rank 0's ends the job, another one's tells that.
            say(f"error: this rank could not end the cluster; aborting the job\n{traceback.format_exc()}")
            flush()
            os._exit(outcome.FAILED)

    def interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """End the script by an exception, in the main thread, since the job has to end."""
        self._monitor.announce_interrupt()
        if self.member.ending.lost is not None:
            raise ClusterLostError(self.member.ending.lost, reported=True)
        called = self.walltime.run_callback(number, frame)
        end = outcome.SignalExit(number, called=called)
        outcome.note(end.outcome)
        raise end

    def on_walltime(self, callback: Callable[[], Any], before: float) -> None:
        """Call `callback` before the walltime; see `Session.on_walltime`."""
        self.walltime.call_back(callback, before)
        self._monitor.wake()  # it has to look at the clock from now on

    def write_report(self, path: str) -> None:
        """Write the report of the job until now."""
        reporter = self._make_reporter()
        reporter.write_now(
            path, self._outcome() if self.closed else ("the script runs", None), ask=not self.over
        )
        if self.state is State.ENDED:
            reporter.close()  # there is no later call that does

    def _end(self, *, had_cluster: bool, final: bool) -> None:
        """End the cluster, if it runs, and the job, if this is `final`."""
        steps: list[Callable[[], object]] = []
        if had_cluster:
            steps += [self._wait_for_loss, self._warn_if_unused]
        if final:
            steps.append(self._silence)
        steps.append(lambda: self._begin_report(fetch=had_cluster))
        steps.append(lambda: close_clients(self._address))
        steps.append(lambda: self._end_member(final=final))
        steps.append(self._finish_report)
        if self.member.leave_open or not final:
            steps.append(self._restore)
        if final:
            steps.append(self._release)
        # Each step runs, even if one before it raises: a Ctrl-C while the script closes the cluster, for example.
        with contextlib.ExitStack() as last_to_first:
            for step in reversed(steps):
                last_to_first.callback(step)
            self._monitor.stop()  # not as a step, so that an interrupt during this wait is an outcome that the steps see

    def _wait_for_loss(self) -> None:
        """The scheduler's death may be why the script failed, and its client notices that first: wait for the report."""
        member = self.member
        member.pump(0.0)
        limit = time.monotonic() + REASON_TIMEOUT
        member.pump_until(lambda: member.ending.stopped or not has_lost_client(), limit)

    def _silence(self) -> None:
        for logger in silence_dask():
            self._undo.callback(setattr, logger, "disabled", False)

    def _end_member(self, *, final: bool) -> None:
        raised = sys.exception()
        if final and isinstance(raised, SystemExit):  # of the function of `execute`; the program may continue
            outcome.note(outcome.outcome_of_error(raised))
        _, code = self._outcome()
        self.member.end(final=final, code=outcome.failure() if code is None else code)

    def _restore(self) -> None:
        self._undo.close()
        # A DaskGpuMpiError that is being raised, perhaps through a `finally`, still needs the hook.
        if self.member.ending.lost is None and not isinstance(sys.exception(), DaskGpuMpiError):
            outcome.retire()

    def _release(self) -> None:
        """Release the last objects, since this process has nothing left to end."""
        abandon_clients(self._address)
        if self._reporter is not None:
            self._reporter.close()
        atexit.unregister(self.end)
        if not self._quiet:
            say(f"ended after {time.monotonic() - self._started:.1f} s")

    def _warn_if_unused(self) -> None:
        """Print a warning if the script has ended well without using the cluster."""
        use, member = self._use, self.member
        if use is None or use.has_client or use.has_other_cluster or member.had_client:
            return
        ended_well = outcome.noted() == outcome.outcome_of_error(None)
        if use.has_computed_locally:
            # A script with `initialize` may have called sys.exit, which nobody notes: so argparse ends a script after --help.
            ended_well = ended_well or not self._outcome()[1]
        if ended_well and member.joined.options.scheduler:
            say(
                "warning: no client has connected to the cluster, and its workers have done nothing; compute() without a client "
                "runs in the script's own process. Fix: client = Client() before the first compute()"
            )

    def _make_reporter(self) -> Reporter:
        if self._reporter is None:
            from dask_gpu_mpi.job.report import Reporter

            now = time.time()
            began = now - (time.monotonic() - self._started)
            joined = self.member.joined
            self._reporter = Reporter(
                joined,
                security_of(self._address, joined.cluster.config),
                all_warnings(joined),
                started=began,
                ready=began + self.ready_seconds,
            )
        return self._reporter

    def _fetch_record(self) -> None:
        """Request the scheduler's record now, since the cluster is about to end."""
        if self._reporter is not None and not self.closed:
            self._reporter.fetch(last=True)

    def _begin_report(self, *, fetch: bool) -> None:
        """Begin to make the report, if the user requested one, while the cluster ends."""
        if self._reporter is not None and self.member.joined.options.recorded:
            lost = self.member.ending.lost is not None
            self._reporter.begin(
                self.member.joined.options.report, self._outcome(), fetch=fetch and not lost, lost=lost
            )

    def _finish_report(self) -> None:
        if self._reporter is not None:
            self._reporter.finish()

    def _outcome(self) -> Outcome:
        """How the job ends."""
        if (lost := self.member.ending.lost) is not None:
            return f"the cluster was lost: {lost}", outcome.FAILED
        # a function of `execute` that raises
        if (error := sys.exception()) is not None:
            return outcome.outcome_of_error(error)
        if (noted := outcome.noted()) is not None:
            return noted
        if self.state is State.CLOSED:
            return "the session was closed; the script continues", None
        return "the script ended", None


#: The last cluster of which this process is or was the client, set when it is made; a forked child has a copy of it.
_script_cluster: ScriptCluster | None = None


def script_cluster() -> ScriptCluster | None:
    """The last cluster's, if this process is or was its client."""
    return _script_cluster


def _disown() -> None:
    """In a forked child: forget the cluster, which is the parent's. Take no lock, since a thread of the parent may hold it."""
    if _script_cluster is not None:
        _script_cluster.state = State.ENDED
        # Dask closes clients at the end of a process, and waits for their event loop, which a child does not have.
        abandon_clients(_script_cluster.member.joined.cluster.address)


os.register_at_fork(after_in_child=_disown)


class Session:
    """A running cluster, on the rank that runs the script.

    Attributes
    ----------
    plan : Plan
        The workers, and their nodes and GPUs.
    address : str
        Address of the scheduler.
    dashboard_link : str or None
        URL of the dashboard, for use on the scheduler's node.
    ready_seconds : float
        Seconds from the start of `initialize`, or of the command, until all workers were up.
    """

    def __init__(self, of_script: ScriptCluster) -> None:
        cluster = of_script.member.joined.cluster
        assert cluster.plan is not None  # the client rank is given it
        self.plan: Plan = cluster.plan
        self.address: str = cluster.address
        self.dashboard_link: str | None = cluster.dashboard
        self.ready_seconds: float = of_script.ready_seconds
        self._config = cluster.config
        self._cluster = of_script
        self._client: Client | None = None
        self._lock = threading.Lock()
        of_script.session = self

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<Session {self.address} workers={len(self.plan.workers)} hosts={len(self.plan.hosts)} {state}>"
        )

    def _repr_html_(self) -> str:
        """The card that Jupyter shows."""
        left = None if self.closed else self.time_left()
        return card(self.plan, self.address, self.dashboard_link, closed=self.closed, seconds_left=left)

    @property
    def closed(self) -> bool:
        """Whether the cluster has been ended: by `close`, by a client's ``shutdown()``, or because it was lost."""
        return self._cluster.over

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the start, each one line."""
        return all_warnings(self._cluster.member.joined)

    @property
    def mpi_library(self) -> str:
        """Version text of the MPI library with which the ranks have met; empty: none was needed."""
        return self._cluster.member.joined.world.library

    @property
    def transport(self) -> str:
        """How workers exchange data, in one line; empty for a single worker, or if it is Dask's protocol alone."""
        return self._cluster.member.joined.cluster.transport

    @property
    def security(self) -> Any:
        """The ``distributed.Security`` for a client; None without TLS."""
        return security_of(self.address, self._config)

    def client(self, **kwargs: Any) -> Client:
        """A new ``distributed.Client`` of this cluster; keywords are passed on."""
        from distributed import Client

        self._check_open("client")
        security = self.security
        if security is not None:
            kwargs.setdefault("security", security)
        return Client(self.address, **kwargs)

    def close(self) -> None:
        """End the cluster; the script continues. May be called again."""
        self._cluster.close()

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

        The same as `dask_gpu_mpi.spmd`, which describes arguments and errors. It uses the script's client, or makes one.

        Examples
        --------
        >>> session.spmd(lambda group: (group.rank, group.hosts[group.rank]))  # doctest: +SKIP
        [(0, 'node1'), (1, 'node1'), (2, 'node2'), (3, 'node2')]
        """
        from dask_gpu_mpi.gang.spmd import spmd

        self._check_open("spmd")
        limits = {"workers": workers, "timeout": timeout, "start_timeout": start_timeout, "grace": grace}
        results: list[Any] = spmd(self._own_client(), fn, *args, **limits)  # type: ignore[arg-type]
        return results

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None if it does not report that."""
        return self._cluster.walltime.time_left()

    def on_walltime(self, callback: Callable[[], Any], before: float = 120.0) -> None:
        """Call `callback` once, in time before the job is ended; then end the job with exit code 75.

        It is called in the main thread, between two steps of the script. The time is `before` seconds before the walltime, if the
        batch system reports that, or when the job is sent SIGTERM or the signal of ``walltime_signal``, if that is earlier. Then
        SystemExit(75) is raised in the script, so that its `finally` and `atexit` run. A requeue checks for the code 75.

        It is called in this process only, not in those that the script forks. Another call of this method replaces it.

        From this call on these signals are handled here, even if they were ignored before. An earlier handler, of the script or a
        library, is called after `callback`; if it raises SystemExit, the code is still 75. A handler that is set after this call
        replaces it, with a warning on standard error. So set handlers first.

        Parameters
        ----------
        callback : callable
            Writes the checkpoint; called without arguments. The cluster still works while it runs.
        before : float
            Seconds before the end.

        Raises
        ------
        InputError
            A signal has another handler, and this is not the main thread, which alone can change that. Or an argument is wrong.
        """
        self._cluster.on_walltime(callback, before)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the job until now: FILE.html is one page for a browser, FILE.json its figures (docs/report.md).

        Without the options `report` and `summary`, tasks and measurements are recorded from the first call on.

        Raises
        ------
        InputError
            The path has another ending, can't be written, or bokeh is not installed; or this process was forked by the script.
        OSError
            The file can't be written.
        TimeoutError
            The scheduler does not answer; no file is written.
        """
        from dask_gpu_mpi.view.report_data import check_report

        if os.getpid() != self._cluster.owner:
            raise InputError(
                "session.report: called in a process that the script has forked",
                expected="the script's process",
                fix="call it there",
            )
        path = os.fspath(path)
        joined = self._cluster.member.joined
        check_report(path, f"rank {joined.rank} on {joined.host}")
        self._cluster.write_report(path)

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise InputError(
                f"{call}: the cluster of this session has ended", expected="a session that is open"
            )

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a Session can't be sent to a task",
            expected="in the script's process alone",
            fix="send session.plan or a value; in a task, distributed.get_client() is a client of the cluster",
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_client(self) -> Client:
        """The script's current client of this cluster, or one that stays open until the session ends."""
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


def current_session() -> Session:
    """The last session of this process.

    Raises
    ------
    InputError
        If there is none: before `initialize`, on other ranks, and in a process that is not the job's script.
    """
    if (session := session_of_process()) is None:
        outcome.report_uncaught()
        raise InputError(
            "current_session: this process has no cluster",
            expected="the script of a job, after its start",
            fix="run it by `dask-gpu-mpi launch`, or call initialize() first; in a notebook or another process use Client() and "
            "dask_gpu_mpi.spmd(client, fn); in a task distributed.get_client()",
        )
    return session


def session_of_process() -> Session | None:
    """The last session of this process, or None."""
    return None if _script_cluster is None else _script_cluster.session
