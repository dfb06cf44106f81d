"""The messages of the start, and those of the agent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup.messages import Channels

START = Event(0, "start", 5)


class Source:
    """The mailbox, or the agent: it has these messages next, and notes how long it was waited for."""

    rank, size = 1, 3
    scratch: str | None = None
    lost = taken = False

    def __init__(self) -> None:
        self.next: list[Any] = []
        self.waits: list[float] = []
        self.closed: list[float] = []
        self.close = self.closed.append

    def receive(self) -> list[Any]:
        found, self.next = self.next, []
        return found

    def events(self, timeout: float) -> list[Any]:
        self.waits.append(timeout)
        return self.receive()

    def exit_text(self) -> str:
        return "killed by signal SIGKILL"


def make() -> tuple[Channels, Any, Any]:
    box, agent = Source(), Source()
    return Channels(box, agent), box, agent  # type: ignore[arg-type]


def test_mail_and_the_agent_are_one_stream() -> None:
    """After what was put back."""
    channels, box, agent = make()
    box.next, agent.next = [START], [("ready", 2)]
    back = [Event(0, kind, None) for kind in ("first", "second")]
    for event in reversed(back):
        channels.push_back([event])
    assert channels.events(9.0) == [*back, START, Event(None, "ready", [2])]
    assert channels.events(9.0) == []
    assert agent.waits == [0.0, 9.0]  # first there was mail: no waiting


def test_without_an_agent_a_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    channels, box, _ = make()
    channels.agent = None
    assert channels.events(0.3) == []
    box.next = [START]
    assert channels.events(0.3) == [START]
    assert slept == [0.3]


def test_a_lost_agent_is_told_once() -> None:
    channels, _, agent = make()
    agent.lost = True
    agent.next = [("failed", "why", 1)]
    lost = Event(None, "agent-lost", ["killed by signal SIGKILL", False])
    assert channels.events(0.0) == [Event(None, "failed", ["why", 1]), lost]
    assert (channels.agent, agent.closed) == (None, [0.5])
    assert channels.events(0.0) == []


def test_what_an_agent_has_not_removed_is_left_to_the_end(tmp_path: Path) -> None:
    channels, _, agent = make()
    agent.scratch = str(tmp_path)
    for _ in range(2):
        channels.drop_agent(1.5)
    channels.order(Order.CLOSE)  # there is none
    assert (agent.closed, channels.left) == ([1.5], [str(tmp_path)])
