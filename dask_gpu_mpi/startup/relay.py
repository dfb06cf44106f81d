"""Between the coordinator and this rank's agent, while the cluster starts: orders, their settings, and answers."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.orders import Answer, Order, SchedulerSettings
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.credentials import add_token
from dask_gpu_mpi.network.scheduler_file import write_scheduler_file
from dask_gpu_mpi.options.dask_config import is_configured
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import Start
from dask_gpu_mpi.startup.messages import COORDINATOR, Channels, Kind
from dask_gpu_mpi.startup.reachability import Connecting


class Relay:
    """Handles the messages from the coordinator and from this rank's agent until the cluster is up."""

    def __init__(self, options: Options, channels: Channels, host: str, timeline: Timeline) -> None:
        self._options = options
        self._channels = channels
        self._host = host
        self._timeline = timeline
        #: This rank's part, once it is known.
        self.start: Start | None = None
        #: The scheduler's, if it lives in this rank's agent.
        self._settings: SchedulerSettings | None = None
        #: Path and scheduler id of the scheduler file, once it is written.
        self.file: tuple[str, str] | None = None
        #: The agent's early reports about workers, for `Member`, which counts them.
        self.early: list[Event] = []
        self._connecting = Connecting(options, channels)

    @property
    def has_scheduler(self) -> bool:
        """Whether the scheduler lives in this rank's agent."""
        return self._settings is not None

    def poll(self) -> None:
        """Report the result of the reachability test, once that is known."""
        self._connecting.poll()

    def on_event(self, event: Event) -> None:
        """Do what the coordinator orders, and report what the agent has done."""
        kind, payload = event.kind, event.payload
        if event.source is None:
            self._on_agent(kind, payload)
        elif self._connecting.on_message(kind, payload):
            pass
        elif kind == Kind.SCHEDULER:
            self._connecting.close_scheduler()
            self._start_scheduler(payload)
        elif kind == Kind.START:
            self._start_workers(payload)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        match kind:
            case Answer.SCHEDULER_UP:
                self._on_scheduler(*payload)
            case Answer.READY:
                self._timeline.add(payload[1])
                self._report_ready()
            case Answer.FAILED:
                self._fail(Failure(*payload))
            case Answer.SCHEDULER_ENDED:
                ended = Problem(
                    f"the scheduler's process ended while the workers started (exit code {payload[0]})",
                    fix="read its output above, or its log file (--log-directory); out of memory, most often",
                )
                self._fail(Failure(ended))
            case Answer.WORKER_ENDED | Answer.WORKERS_ENDED:
                self.early.append(Event(None, kind, payload))
            case Answer.LOST:
                lost = Problem(
                    f"the agent of this rank ended while the workers started ({payload[0]})",
                    fix="read its output above; out of memory, most often",
                )
                self._fail(Failure(lost))

    def _fail(self, failure: Failure) -> None:
        self._channels.send(COORDINATOR, Kind.FAILED, failure)

    def _start_scheduler(self, settings: SchedulerSettings) -> None:
        plan = settings.plan
        if plan is not None:
            plan = replace(plan, warnings=(*self._options.warnings, *plan.warnings))
        # A cluster without encryption is open to everyone, and so is its dashboard.
        token = secrets.token_urlsafe(32) if self._options.protocol.encrypts else ""
        self._settings = replace(settings, token=token, plan=plan)
        self._channels.order(Order.START_SCHEDULER, self._settings)

    def _on_scheduler(self, address: str, http_port: int | None, identity: str) -> None:
        """It is up: write the scheduler file, and report its address."""
        assert self._settings is not None  # it was started
        link = dashboard_link(self._options, self._host, http_port, self._settings.token)
        path = self._options.scheduler_file
        if path:
            self._channels.begin_step(f"writing the scheduler file {path!r}")
            try:
                write_scheduler_file(path, address, http_port, identity, self._settings.config, link)
            except InputError as error:
                self._fail(Failure.of(error))
                return
            self.file = (os.path.abspath(path), identity)
            self._channels.order(Order.SCHEDULER_FILE, self.file)
        self._channels.send(COORDINATOR, Kind.ADDRESS, (address, link))

    def _start_workers(self, start: Start) -> None:
        self.start = start
        self._connecting.close()
        self._timeline.lap("wait for the plan and the scheduler")
        if start.workers:
            self._channels.order(Order.START_WORKERS, start)
        else:
            self._report_ready()

    def _report_ready(self) -> None:
        self._timeline.lap("start workers")
        steps = self._timeline.take() if self._options.recorded else []
        self._channels.send(COORDINATOR, Kind.READY, steps)


def dashboard_link(options: Options, host: str, port: int | None, token: str) -> str | None:
    """The link to the dashboard, with its token if it has one; None without a dashboard (`port`)."""
    if port is None:
        return None
    listens = options.dashboard_address.rpartition(":")[0] or host
    scheme = "https" if is_configured("distributed.scheduler.dashboard.tls.cert") else "http"
    link = f"{scheme}://{'localhost' if listens == '127.0.0.1' else listens}:{port}/status"
    return add_token(link, token) if token else link
