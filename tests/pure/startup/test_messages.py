"""The messages of the start, and those of the agent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup.messages import Channels

START = Event(0, "start", 5)


def source() -> Mock:
    """The mailbox, or the agent: it has the messages of `next` next."""

    def receive(*_: float) -> list[Any]:
        found, made.next = made.next, []
        return found

    made = Mock(rank=1, size=3, scratch=None, lost=False, taken=False, next=[], receive=receive)
    made.events.side_effect = receive
    made.exit_text.return_value = "killed by signal SIGKILL"
    return made


def make() -> tuple[Channels, Mock, Mock]:
    box, agent = source(), source()
    return Channels(box, agent), box, agent


def test_mail_and_the_agent_are_one_stream() -> None:
    """After what was put back."""
    channels, box, agent = make()
    box.next, agent.next = [START], [("ready", 2)]
    back = [Event(0, kind, None) for kind in ("first", "second")]
    for event in reversed(back):
        channels.push_back([event])
    assert channels.events(9.0) == [*back, START, Event(None, "ready", [2])]
    assert channels.events(9.0) == []
    assert agent.events.call_args_list == [call(0.0), call(9.0)]  # first there was mail: no waiting


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
    assert (channels.agent, agent.close.call_args_list) == (None, [call(0.5)])
    assert channels.events(0.0) == []


def test_what_an_agent_has_not_removed_is_left_to_the_end(tmp_path: Path) -> None:
    channels, _, agent = make()
    agent.scratch = str(tmp_path)
    for _ in range(2):
        channels.drop_agent(1.5)
    channels.order(Order.CLOSE)  # there is none
    assert (agent.close.call_args_list, channels.left) == ([call(1.5)], [str(tmp_path)])
