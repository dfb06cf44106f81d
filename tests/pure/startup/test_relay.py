"""What a rank does with the messages of the start, without ranks and without an agent."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import SchedulerSettings
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import OptionError, Problem, StartupError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.reachability import Listener, Node, Tokens
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.startup.messages import Connect, Kind, Listen, Start
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


def until_reported(rank: Relay, channels: Recorder) -> tuple[Any, ...]:
    limit = time.monotonic() + 30
    while not channels.sent and time.monotonic() < limit:
        rank.poll()
        time.sleep(0.01)
    (report,) = channels.sent
    return report


def test_the_agent_starts_the_workers_of_its_rank() -> None:
    rank, channels = relay(startup_timeout=300.0)
    rank.on_event(Event(0, Kind.START, start(WORKER)))
    ((order, given),) = channels.sent
    assert (order, given.workers, given.config) == ("workers", (WORKER,), {"key": "secret"})
    assert (given.address, given.delay) == ("tls://h:1", 0.5)
    assert rank.start is not None
    rank.on_event(Event(None, "ready", [1, []]))
    assert channels.sent[1:] == [(0, Kind.READY, [])]


def test_a_rank_without_workers_is_ready_at_once() -> None:
    rank, channels = relay()
    rank.on_event(Event(0, Kind.START, start()))
    assert channels.sent == [(0, Kind.READY, [])]


@pytest.mark.parametrize(
    ("kind", "payload", "text"),
    [
        ("failed", [Problem("no disk"), 2, "OptionError"], "no disk"),
        (
            "scheduler-ended",
            [3],
            "the scheduler's process ended while the workers started (exit code 3). Fix: ",
        ),
        (
            "agent-lost",
            ["exit code 9", False],
            "the agent of this rank ended while the workers started (exit code 9). Fix",
        ),
    ],
)
def test_what_the_agent_reports_fails_the_start(kind: str, payload: list[Any], text: str) -> None:
    rank, channels = relay()
    rank.on_event(Event(None, kind, payload))
    ((to, sent, failure),) = channels.sent
    assert (to, sent) == (0, Kind.FAILED)
    assert str(failure.problem).startswith(text)
    assert type(failure.error(reported=True)) is (OptionError if kind == "failed" else StartupError)


def test_workers_that_end_early_are_for_later() -> None:
    rank, channels = relay()
    events = [Event(None, "worker-ended", ["a", "why"]), Event(None, "workers-ended", [True])]
    for event in events:
        rank.on_event(event)
    assert rank.early == events
    assert channels.sent == []


def test_the_scheduler_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    rank, channels = relay(scheduler_file=str(path), dashboard_address=":8787", warnings=("of an option",))
    assert not rank.has_scheduler
    made = plan_of(worker_plan("0"))
    rank.on_event(
        Event(
            0,
            Kind.SCHEDULER,
            SchedulerSettings("10.0.0.1", {"key": "secret"}, "", device="GPU-x", plan=made),
        )
    )
    assert rank.has_scheduler
    ((order, settings),) = channels.sent
    assert order == "scheduler"
    assert (settings.listen, settings.device) == ("10.0.0.1", "GPU-x")
    assert settings.plan == replace(made, warnings=("of an option", *made.warnings))
    assert settings.config == {"key": "secret"}
    assert "'secret'" not in repr(settings)
    token = settings.token
    assert len(token) >= 43  # 32 bytes
    assert token not in repr(settings)
    rank.on_event(Event(None, "scheduler", ["tls://10.0.0.1:4711", 8787, "Scheduler-1"]))
    file = (str(path), "Scheduler-1")
    assert rank.file == file
    assert channels.sent[1:] == [
        (0, Kind.STEP, f"writing the scheduler file {str(path)!r}"),
        ("scheduler-file", file),
        (0, Kind.ADDRESS, ("tls://10.0.0.1:4711", f"http://h:8787/status?token={token}")),
    ]
    written = json.loads(path.read_text())
    assert written["address"] == "tls://10.0.0.1:4711"
    assert written["dask-gpu-mpi"]["dashboard"] == f"http://h:8787/status?token={token}"


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UCX])
def test_the_dashboard_of_a_cluster_without_encryption_has_no_token(protocol: Protocol) -> None:
    rank, channels = relay(protocol=protocol, dashboard_address=":8787")
    rank.on_event(Event(0, Kind.SCHEDULER, SchedulerSettings("10.0.0.1", {}, "")))
    assert channels.sent[0][1].token == ""
    rank.on_event(Event(None, "scheduler", [f"{protocol}://10.0.0.1:4711", 8787, "Scheduler-1"]))
    assert channels.sent[1:] == [(0, Kind.ADDRESS, (f"{protocol}://10.0.0.1:4711", "http://h:8787/status"))]


def test_a_scheduler_file_that_can_not_be_written_fails_the_start(tmp_path: Path) -> None:
    rank, channels = relay(scheduler_file=str(tmp_path / "nowhere" / "scheduler.json"))
    rank.on_event(Event(0, Kind.SCHEDULER, SchedulerSettings("10.0.0.1", {}, "")))
    rank.on_event(Event(None, "scheduler", ["tls://10.0.0.1:4711", 8787, "Scheduler-1"]))
    to, kind, failure = channels.sent[-1]
    assert (to, kind, failure.exit_code) == (0, Kind.FAILED, 2)
    assert "can't be written" in str(failure.problem)
    assert rank.file is None


def test_the_peers_that_a_rank_does_not_reach() -> None:
    tokens = Tokens()
    here, heard = relay()
    here.on_event(Event(0, Kind.LISTEN, Listen("127.0.0.1", tokens, tokens)))
    ports = heard.sent[0][2]
    assert 0 not in (ports.scheduler, ports.workers)
    up = Node("h2", 2, "127.0.0.1", tokens, ports.workers)
    strange = Node("h3", 3, "127.0.0.1", Tokens(), ports.workers)
    rank, channels = relay()
    to = Connect(f"127.0.0.1:{ports.scheduler}", tokens, (up, strange))
    rank.on_event(Event(0, Kind.CONNECT, to))
    lost = {"something else answers there": ["h3"]}
    assert until_reported(rank, channels)[2].lost == lost
    # the scheduler has its port, the workers get theirs when they start
    here.on_event(Event(0, Kind.SCHEDULER, SchedulerSettings("127.0.0.1", {}, "")))
    Listener("127.0.0.1", ports.scheduler, tokens).close()
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", ports.workers, tokens)
    here.on_event(Event(0, Kind.START, start()))
    Listener("127.0.0.1", ports.workers, tokens).close()


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
