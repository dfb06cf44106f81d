"""The script's object of a running cluster; the end of the script's process is in `client_end`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job.announcement import Card, gpu_count
from dask_gpu_mpi.job.client_end import ClientEnd
from dask_gpu_mpi.job.dask_client import security_of
from dask_gpu_mpi.plan.model import Plan

if TYPE_CHECKING:
    from distributed import Client

_current: Session | None = None


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

    def __init__(self, end: ClientEnd) -> None:
        global _current
        cluster = end.member.joined.cluster
        assert cluster.plan is not None  # the client rank is given it
        self.plan: Plan = cluster.plan
        self.address: str = cluster.address
        self.dashboard_link: str | None = cluster.dashboard
        self.ready_seconds: float = end.ready_seconds
        self._config = cluster.config
        self._end = end
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
        return self._end.closed

    @property
    def security(self) -> Any:
        """The ``distributed.Security`` for a client; None without TLS."""
        return security_of(self.address, self._config)

    def client(self, **kwargs: Any) -> Client:
        """A new ``distributed.Client`` of this cluster; keywords are passed on."""
        from distributed import Client

        security = self.security
        if security is not None:
            kwargs.setdefault("security", security)
        return Client(self.address, **kwargs)

    def close(self) -> None:
        """End the cluster; the script continues. May be called again."""
        self._end.close()

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

        if self.closed:
            raise InputError("spmd: the cluster of this session has ended", expected="a session that is open")
        limits = {"workers": workers, "timeout": timeout, "start_timeout": start_timeout, "grace": grace}
        results: list[Any] = spmd(self._own_client(), fn, *args, **limits)  # type: ignore[arg-type]
        return results

    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None if it does not report that."""
        return self._end.walltime.time_left()

    def on_walltime(self, callback: Callable[[], Any], before: float = 120.0) -> None:
        """Call `callback` once, in time before the job is ended; then end the job with exit code 75.

        It is called in the main thread, between two steps of the script. The time is `before` seconds before the walltime, if the
        batch system reports that, or when the job is sent SIGTERM or the signal of ``walltime_signal``, if that is earlier. Then
        SystemExit(75) is raised in the script, so that its `finally` and `atexit` run. A requeue checks for the code 75.

        It is called in this process only, not in those that the script forks.

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
            A signal has another handler, and this is not the main thread, which alone can change that.
        """
        self._end.walltime.call_back(callback, before)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the job until now: FILE.html is one page for a browser, FILE.json its figures (docs/report.md).

        Without the option `report`, tasks and measurements are recorded from the first call on.

        Raises
        ------
        InputError
            The path has another ending, can't be written, or bokeh is not installed; or this process was forked by the script.
        OSError
            The file can't be written.
        TimeoutError
            The scheduler does not answer; no file is written.
        """
        from dask_gpu_mpi.view.report_page import check_report

        if os.getpid() != self._end.owner:
            raise InputError(
                "session.report: called in a process that the script has forked",
                expected="the script's process",
                fix="call it there",
            )
        path = os.fspath(path)
        joined = self._end.member.joined
        check_report(path, f"rank {joined.channels.rank} on {joined.host}")
        self._end.write_report(path)

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


def current_session() -> Session | None:
    """The last session of this process; None before `initialize` and on other ranks."""
    return _current
