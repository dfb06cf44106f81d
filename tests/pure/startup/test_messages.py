"""The messages of the start, and those of the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup import messages as channels_module
from dask_gpu_mpi.startup.messages import Channels


class Box:
    rank, size = 1, 3

    def __init__(self) -> None:
        self.mails: list[Event] = []
        self.sent: list[tuple[int, str, Any]] = []

    def receive(self) -> list[Event]:
        mails, self.mails = self.mails, []
        return mails

    def send(self, rank: int, kind: str, payload: Any) -> None:
        self.sent.append((rank, kind, payload))


class Agent:
    def __init__(self) -> None:
        self.frames: list[tuple[Any, ...]] = []
        self.waits: list[float] = []
        self.lost = self.taken = False
        self.closed: float | None = None
        self.scratch: str | None = None
        self.orders: list[tuple[str, Any]] = []

    def send(self, order: str, payload: Any) -> None:
        self.orders.append((order, payload))

    def events(self, timeout: float) -> list[tuple[Any, ...]]:
        self.waits.append(timeout)
        frames, self.frames = self.frames, []
        return frames

    def exit_text(self) -> str:
        return "killed by signal SIGKILL"

    def close(self, timeout: float) -> None:
        self.closed = timeout


def make() -> tuple[Channels, Any, Any]:
    box, agent = Box(), Agent()
    return Channels(box, agent), box, agent  # type: ignore[arg-type]


def test_mail_and_the_agent_are_one_stream() -> None:
    channels, box, agent = make()
    box.mails = [Event(0, "start", 5)]
    agent.frames = [("ready", 2)]
    assert channels.events(9.0) == [Event(0, "start", 5), Event(None, "ready", [2])]
    assert agent.waits == [0.0]  # there was mail: no waiting
    assert channels.events(9.0) == []
    assert agent.waits == [0.0, 9.0]
    assert (channels.rank, channels.size) == (1, 3)


def test_without_an_agent_a_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(channels_module.time, "sleep", slept.append)
    box = Box()
    channels = Channels(box, None)  # type: ignore[arg-type]
    assert channels.events(0.3) == []
    assert slept == [0.3]
    box.mails = [Event(0, "start", 5)]
    assert channels.events(0.3) == [Event(0, "start", 5)]
    assert slept == [0.3]


def test_a_lost_agent_is_told_once() -> None:
    channels, _, agent = make()
    agent.lost = True
    agent.frames = [("failed", "why", 1)]
    assert channels.events(0.0) == [
        Event(None, "failed", ["why", 1]),
        Event(None, "agent-lost", ["killed by signal SIGKILL", False]),
    ]
    assert channels.agent is None
    assert agent.closed == 0.5
    assert channels.events(0.0) == []


def test_pushed_back_events_come_first() -> None:
    channels, box, _ = make()
    box.mails = [Event(0, "late", None)]
    channels.push_back([Event(0, "second", None)])
    channels.push_back([Event(0, "first", None)])
    assert [event.kind for event in channels.events(0.0)] == ["first", "second", "late"]


def test_sending_and_dropping(tmp_path: Path) -> None:
    """What an agent has not removed is left to the end."""
    channels, box, agent = make()
    channels.send(2, "hello", "x")
    assert box.sent == [(2, "hello", "x")]
    channels.order(Order.JOINED)
    agent.scratch = str(tmp_path)
    channels.drop_agent(1.5)
    channels.drop_agent(1.5)
    channels.order(Order.CLOSE)  # there is none
    assert agent.orders == [(Order.JOINED, None)]
    assert agent.closed == 1.5
    assert channels.events(0.0) == []
    assert channels.left == [str(tmp_path)]
