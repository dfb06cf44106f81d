"""An agent that dies: how often, and when, it is restarted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.job import member as agent_restarts
from dask_gpu_mpi.job.member import DELAYS, AgentRestarts, Member
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Channels, Start


def test_an_agent_is_started_three_times_again() -> None:
    assert DELAYS == (0.5, 2.0, 8.0)


def test_an_agent_that_cannot_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another try each time, then the rank is removed; nothing is raised."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    class Silent:
        rank, agent = 1, None
        sent: list[Any]

        def __init__(self) -> None:
            self.sent = []

        def events(self, timeout: float) -> list[Any]:
            return []

        def send(self, *message: Any) -> None:
            self.sent.append(message)

    monkeypatch.setattr(agent_restarts, "start_agent", full)
    channels = Silent()
    joined: Any = SimpleNamespace(
        channels=channels,
        options=SimpleNamespace(log_directory=None, tolerate_lost_ranks=0),
        environ={},
        host="h1",
        start=SimpleNamespace(workers=(SimpleNamespace(name="1"),)),
    )
    rank = Member(joined, threading.local(), leave_open=False, has_client=True)  # type: ignore[arg-type]
    rank._restarts.lost("the agent of rank 1 on h1 ended (killed)")
    for _ in range(5):
        if rank._restarts.due is not None:
            rank._restarts.due = 0.0
        rank.pump(0.0)
    assert channels.sent == [(0, "workers-ended", (1, True))]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert [text.rpartition(" in ")[2] for text in said[:3]] == ["0.5 s", "2 s", "8 s"]
    assert said[1].endswith("could not be started (Too many open files); restarting it in 2 s")
    assert said[3].endswith("(Too many open files); rank 1 removed, continuing with the other ranks")


class Agent:
    """Notes what it is sent."""

    scratch = "/scratch"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def configure(self, options: Any, *, speaks: bool) -> None:
        self.sent.append(("configure", speaks))

    def send(self, order: str, payload: Any = None) -> None:
        self.sent.append((order, payload))


ONE, OTHER = (SimpleNamespace(name=name) for name in ("1-0", "1-1"))


def restarts(workers: tuple[Any, ...] = (ONE, OTHER)) -> tuple[AgentRestarts, Any]:
    joined: Any = SimpleNamespace(
        channels=Channels(SimpleNamespace(rank=1, size=2), None),  # type: ignore[arg-type]
        options=Options(),
        environ={"A": "1"},
        host="h1",
        start=Start("tls://h:1", "tls", None, workers, {"key": "secret"}),
    )
    return AgentRestarts(joined), joined.channels


def test_another_agent_is_started_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, started = Agent(), []
    monkeypatch.setattr(agent_restarts, "start_agent", lambda *args: started.append(args) or agent)
    now = 100.0
    monkeypatch.setattr(agent_restarts.time, "monotonic", lambda: now)
    again, channels = restarts()
    again.start_if_due()
    again.worker_ended("1-0", "five deaths")
    again.lost("it died")
    assert (again.due, again.tried) == (100.5, 1)
    now = 100.5
    again.start_if_due()
    assert started == []
    now = 100.6
    again.start_if_due()
    again.start_if_due()
    assert started == [(Options(), {"A": "1"})]
    assert channels.agent is agent
    assert again.due is None
    again.start_workers()
    orders = [
        (order, payload if order != Order.START_WORKERS else (payload.workers, payload.config))
        for order, payload in agent.sent
    ]
    workers = (Order.START_WORKERS, ((OTHER,), {"key": "secret"}))
    assert orders == [("configure", False), (Order.JOINED, None), workers]


def test_an_agent_without_workers_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    again, _ = restarts(workers=())
    again.lost("it died")
    assert again.due is None
    assert capsys.readouterr().err == ""
