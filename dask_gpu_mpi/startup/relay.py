"""Between the coordinator and this rank's agent, while the cluster starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import threading
from typing import Any

from dask_gpu_mpi.agent.orders import Answer, Order
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.reachability import Listener, Tokens, connect_only, connect_to
from dask_gpu_mpi.network.scheduler_file import write_scheduler_file
from dask_gpu_mpi.options.model import Options

from .agent_settings import scheduler_settings, worker_settings
from .channels import Channels, Event
from .messages import COORDINATOR, Kind, Start

__all__ = ["Relay", "SchedulerStart", "dashboard_link", "start_workers"]


class SchedulerStart:
    """What the scheduler's rank does while the cluster starts."""

    def __init__(self, options: Options, channels: Channels, host: str) -> None:
        self._options = options
        self._channels = channels
        self._host = host
        #: Dask configuration with the credentials; None: the scheduler is not this rank's to start.
        self._config: dict[str, Any] | None = None
        #: Path and scheduler id of the scheduler file, once it is written.
        self.file: tuple[str, str] | None = None
        self._listener: Listener | None = None

    @property
    def started(self) -> bool:
        """Whether the scheduler lives in this rank's agent."""
        return self._config is not None

    def listen(self, address: str, tokens: Tokens) -> None:
        """Listen at the address of the scheduler to come, for the reachability test."""
        try:
            self._listener = Listener(address, self._options.scheduler_port or 0, tokens)
        except OSError:
            self._channels.send(COORDINATOR, Kind.LISTENING, "")
        else:
            self._channels.send(COORDINATOR, Kind.LISTENING, f"{address}:{self._listener.port}")

    def start(self, listen: str, config: dict[str, Any], device: str) -> None:
        """Have the agent start it."""
        self._config = config
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._channels.order(Order.START_SCHEDULER, scheduler_settings(self._options, listen, config, device))

    def on_up(self, address: str, http_port: int | None, identity: str) -> None:
        """It is up: write the scheduler file, and report its address."""
        try:
            self._write_file(address, http_port, identity)
        except InputError as error:
            self._channels.send(COORDINATOR, Kind.FAILED, Failure.of(error))
        else:
            link = dashboard_link(self._options, self._host, http_port)
            self._channels.send(COORDINATOR, Kind.ADDRESS, (address, link))

    def _write_file(self, address: str, http_port: int | None, identity: str) -> None:
        path = self._options.scheduler_file
        if not path:
            return
        write_scheduler_file(path, address, http_port, identity, self._config or {})
        self.file = (os.path.abspath(path), identity)
        self._channels.order(Order.SCHEDULER_FILE, self.file)


def start_workers(channels: Channels, options: Options, start: Start) -> None:
    """Have the agent of this rank start its workers."""
    if channels.agent is not None:
        settings = worker_settings(options, start)
        channels.order(Order.START_WORKERS, (settings, start.workers, start.config))


class Relay:
    """What a rank that takes part does with messages from the coordinator and from its agent, until the cluster is up."""

    def __init__(self, options: Options, channels: Channels, host: str, timeline: Timeline) -> None:
        self._options = options
        self._channels = channels
        self._timeline = timeline
        self.scheduler = SchedulerStart(options, channels, host)
        #: This rank's part, once it is known.
        self.start: Start | None = None
        #: What the agent reported of workers already, for `Member`, which counts them.
        self.early: list[Event] = []
        #: What came of connecting to the scheduler's host, once it is known.
        self._connected: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def poll(self) -> None:
        """Report what came of connecting to the scheduler's host, once that is known."""
        with contextlib.suppress(queue.Empty):
            failure = self._connected.get_nowait()
            self._channels.send(COORDINATOR, Kind.FAILED if failure else Kind.REACHED, failure)

    def on_event(self, event: Event) -> None:
        """Do what the coordinator wants, and report what the agent has done."""
        kind, payload = event.kind, event.payload
        if event.source is None:
            self._on_agent(kind, payload)
        elif kind == Kind.LISTEN:
            self.scheduler.listen(*payload)
        elif kind == Kind.CONNECT:
            # In a thread: it may take seconds, and rank 0 has messages of others to handle.
            threading.Thread(target=self._connect, args=payload, daemon=True).start()
        elif kind == Kind.SCHEDULER:
            self.scheduler.start(*payload)
        elif kind == Kind.START:
            self._start_workers(payload)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        if kind == Answer.SCHEDULER_UP:
            self.scheduler.on_up(*payload)
        elif kind == Answer.READY:
            self._timeline.add(payload[1])
            self._report_ready()
        elif kind == Answer.FAILED:
            self._fail(Failure(*payload))
        elif kind == Answer.SCHEDULER_ENDED:
            text = f"the scheduler's process ended while the workers started (exit code {payload[0]})"
            self._fail(Failure(text, 1))
        elif kind in (Answer.WORKER_FAILED, Answer.WORKERS_ENDED):
            self.early.append(Event(None, kind, payload))
        elif kind == Answer.LOST:
            self._fail(Failure(f"its agent ended while it started ({payload[0]})", 1))

    def _fail(self, failure: Failure) -> None:
        self._channels.send(COORDINATOR, Kind.FAILED, failure)

    def _connect(self, target: str, where: str, tokens: Tokens | None) -> None:
        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        error = connect_to(host, int(port), tokens).error if tokens else connect_only(host, int(port))
        text = (
            f"could not reach the scheduler's host at {target} ({where}): {error}. Fix: choose a network that leads there with "
            "interface (--interface), or open the port in the firewall"
        )
        self._connected.put(Failure(text, 2) if error else None)

    def _start_workers(self, start: Start) -> None:
        self.start = start
        self._timeline.lap("wait for the plan and the scheduler")
        if start.workers:
            start_workers(self._channels, self._options, start)
        else:
            self._report_ready()

    def _report_ready(self) -> None:
        self._timeline.lap("start workers")
        steps = self._timeline.take() if self._options.timeline else []
        self._channels.send(COORDINATOR, Kind.READY, steps)


def dashboard_link(options: Options, host: str, port: int | None) -> str | None:
    """Where the dashboard is, for people; None: nowhere."""
    if not options.dashboard or port is None or importlib.util.find_spec("bokeh") is None:
        return None
    listens = options.dashboard_address.rpartition(":")[0] or host
    return f"http://{'localhost' if listens == '127.0.0.1' else listens}:{port}/status"
