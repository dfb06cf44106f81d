"""What a rank does with the messages of the start, without ranks and without an agent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import SchedulerSettings
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import OptionError, Problem, StartupError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.reachability import Listener, Node, listener_token
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.startup.messages import Kind, Listen, Start
from dask_gpu_mpi.startup.relay import Relay, dashboard_link
from support.mocks.inputs import plan_of, worker_plan

WORKER = worker_plan("a", rank=1, cpus=(0,))


class Recorder:
    """Channels and agent in one: it notes what is sent."""

    def __init__(self) -> None:
        self.agent: Any = self
        self.sent: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        self.sent.append(message)

    order = send

    def begin_step(self, step: str) -> None:
        self.send(0, Kind.STEP, step)


def relay(**options: Any) -> tuple[Relay, Recorder]:
    channels: Any = Recorder()
    return Relay(Options(**options), channels, "h", Timeline("rank")), channels


def start(*workers: WorkerPlan) -> Start:
    return Start("tls://h:1", "tls", "127.0.0.1", workers, {"key": "secret"}, delay=0.5, limit=400.0)


def test_the_agent_starts_the_workers_of_its_rank() -> None:
    """If it has none, it is ready at once."""
    rank, channels = relay(startup_timeout=300.0)
    begins = start(WORKER)
    rank.on_event(Event(0, Kind.START, begins))
    assert (rank.start, channels.sent) == (begins, [("workers", begins)])
    rank.on_event(Event(None, "ready", [1, []]))
    assert channels.sent[1:] == [(0, Kind.READY, [])]
    rank, channels = relay()
    rank.on_event(Event(0, Kind.START, start()))
    assert channels.sent == [(0, Kind.READY, [])]


@pytest.mark.parametrize(
    ("kind", "payload", "text", "error"),
    [
        ("failed", [Problem("no disk"), 2, "OptionError"], "no disk", OptionError),
        ("scheduler-ended", [3], "the scheduler's process ended .* .exit code 3.. Fix: ", StartupError),
        ("agent-lost", ["exit code 9", False], "the agent of .* ended .* .exit code 9.. Fix: ", StartupError),
    ],
)
def test_what_the_agent_reports_fails_the_start(
    kind: str, payload: list[Any], text: str, error: type[Exception]
) -> None:
    rank, channels = relay()
    rank.on_event(Event(None, kind, payload))
    ((to, sent, failure),) = channels.sent
    assert (to, sent) == (0, Kind.FAILED)
    assert re.match(text, str(failure.problem))
    assert type(failure.error(reported=True)) is error


SETTINGS = SchedulerSettings(
    "10.0.0.1", {"key": "secret"}, "", device="GPU-x", plan=plan_of(worker_plan("0"))
)


def scheduler_up(**options: Any) -> tuple[Relay, Recorder]:
    """The scheduler has been ordered, and is up."""
    rank, channels = relay(dashboard_address=":8787", **options)
    assert not rank.has_scheduler
    rank.on_event(Event(0, Kind.SCHEDULER, SETTINGS))
    assert rank.has_scheduler
    rank.on_event(Event(None, "scheduler", ["tls://10.0.0.1:4711", 8787, "Scheduler-1"]))
    return rank, channels


def test_the_scheduler_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    rank, channels = scheduler_up(scheduler_file=str(path), warnings=("of an option",))
    (order, settings), *later = channels.sent
    token = settings.token
    assert SETTINGS.plan is not None
    warned = replace(SETTINGS.plan, warnings=("of an option", *SETTINGS.plan.warnings))
    assert (order, settings) == ("scheduler", replace(SETTINGS, token=token, plan=warned))
    assert len(token) >= 43  # 32 bytes
    assert not any(secret in repr(settings) for secret in ("'secret'", token))
    assert rank.file == (str(path), "Scheduler-1")
    link = f"http://h:8787/status?token={token}"
    assert later == [
        (0, Kind.STEP, f"writing the scheduler file {str(path)!r}"),
        ("scheduler-file", rank.file),
        (0, Kind.ADDRESS, ("tls://10.0.0.1:4711", link)),
    ]
    written = json.loads(path.read_text())
    assert (written["address"], written["dask-gpu-mpi"]["dashboard"]) == ("tls://10.0.0.1:4711", link)


def test_listeners_end_where_the_scheduler_and_the_workers_begin() -> None:
    """What is found by connections to them: test_reachability."""
    token = listener_token()
    rank, channels = relay()
    node = Node("h1", 0, "127.0.0.1", token)
    rank.on_event(Event(0, Kind.LISTEN, Listen(node, node)))
    ports = channels.sent[0][2]
    rank.on_event(Event(0, Kind.SCHEDULER, SchedulerSettings("127.0.0.1", {}, "")))
    Listener("127.0.0.1", ports.scheduler, token).close()
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", ports.workers, token)
    rank.on_event(Event(0, Kind.START, start()))
    Listener("127.0.0.1", ports.workers, token).close()


@pytest.mark.parametrize(
    ("address", "port", "link"),
    [
        ("127.0.0.1:8787", 8788, "http://localhost:8788/status?token=abc"),
        (":8787", 8787, "http://h:8787/status?token=abc"),
        ("10.0.0.1:0", 4711, "http://10.0.0.1:4711/status?token=abc"),
        (":8787", None, None),
    ],
)
def test_the_link_to_the_dashboard(address: str, port: int | None, link: str | None) -> None:
    assert dashboard_link(Options(dashboard_address=address), "h", port, "abc") == link
