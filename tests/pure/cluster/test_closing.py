"""The end of one rank, without processes: who is told what, when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.cluster import closing
from dask_gpu_mpi.cluster.ending import State
from dask_gpu_mpi.cluster.member import Member
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.events import Event


class Agent:
    """One that never answers, and whose scratch takes very long to remove."""

    killed = False

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def send(self, command: str, payload: Any = None) -> None:
        self._said.append(command)

    def kill(self) -> None:
        self._said.append("killed")


class Post:
    """Two ranks; time passes where this one waits."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.left: list[str] = []
        self.agent: Agent | None = Agent(self.said)
        self.mailbox = SimpleNamespace(flush=lambda timeout: True)
        self._mine: list[Event] = []
        #: What the other rank says, and when.
        self.other = (2.0, Event(1, "closed", (1, [])))

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.said.append(kind)
        if rank == self.rank:
            self._mine.append(Event(0, kind, payload))

    def events(self, timeout: float) -> list[Event]:
        self.now += timeout
        events, self._mine = self._mine, []
        if self.now > self.other[0]:
            events.append(self.other[1])
        return events

    def drop_agent(self, timeout: float) -> None:
        if self.agent is not None:
            self.agent = None
            self.said.append("removed")
            self.now += 500.0


def wind_down(post: Post, monkeypatch: pytest.MonkeyPatch, *, has_scheduler: bool) -> Member:
    monkeypatch.setattr(closing.time, "monotonic", lambda: post.now)
    joined: Any = SimpleNamespace(
        post=post,
        options=Options(),
        environ={},
        host="h1",
        start=SimpleNamespace(workers=("0",), is_client=True),
        timeline=SimpleNamespace(lap=lambda name: None),
        steps={},
        scheduler_file=None,
        has_scheduler=has_scheduler,
        go=SimpleNamespace(plan=SimpleNamespace(scheduler=SimpleNamespace(rank=0))),
    )
    signals: Any = SimpleNamespace()
    rank = Member(joined, signals, leave_open=False, has_client=True)
    rank._closing.run()
    assert rank.ending.state is State.LEFT
    return rank


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_slow_rank_0_tells_first_and_still_hears_the_others(
    has_scheduler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post()
    rank = wind_down(post, monkeypatch, has_scheduler=has_scheduler)
    assert post.said[:4] == ["close-workers", "killed", "closed", "removed"]
    assert rank.coordinator is not None
    assert rank.coordinator.silent == []


def test_a_silent_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post()
    post.other = (10_000.0, post.other[1])
    rank = wind_down(post, monkeypatch, has_scheduler=False)
    assert rank.coordinator is not None
    assert rank.coordinator.silent == [1]
