"""The end of one rank, without processes: who is told what, when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import end_coordinator
from dask_gpu_mpi.job.ending import State
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Event


class Agent:
    """One that never answers, and whose scratch takes very long to remove."""

    killed = False

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def send(self, command: str, payload: Any = None) -> None:
        self._said.append(command)

    def kill(self) -> None:
        self._said.append("killed")


class Channels:
    """Two ranks; time passes where this one waits."""

    size = 2

    def __init__(self) -> None:
        self.rank = 0
        self.now = 0.0
        self.said: list[str] = []
        self.left: list[str] = []
        self.agent: Agent | None = Agent(self.said)
        self.flushed: list[float] = []
        self.mailbox = SimpleNamespace(flush=self.flushed.append, lost=set())
        self._mine: list[Event] = []
        #: What the other rank says, and when.
        self.other = (2.0, Event(1, "closed", 1))
        #: Other events, each once.
        self.others: list[tuple[float, Event]] = []

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.said.append(kind)
        if rank == self.rank:
            self._mine.append(Event(0, kind, payload))

    def events(self, timeout: float) -> list[Event]:
        self.now += timeout
        events, self._mine = self._mine, []
        if self.others:
            while self.others and self.now > self.others[0][0]:
                events.append(self.others.pop(0)[1])
        elif self.now > self.other[0]:
            events.append(self.other[1])
            if self.other[1].source is None:
                self.other = (10_000.0, self.other[1])
        return events

    def drop_agent(self, timeout: float) -> None:
        if self.agent is not None:
            self.agent = None
            self.said.append("removed")
            self.now += 500.0


def wind_down(
    channels: Channels,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_scheduler: bool,
    shutdown_timeout: float = 10.0,
) -> Member:
    monkeypatch.setattr(end_coordinator.time, "monotonic", lambda: channels.now)
    joined: Any = SimpleNamespace(
        channels=channels,
        options=Options(shutdown_timeout=shutdown_timeout),
        environ={},
        host="h1",
        start=SimpleNamespace(workers=("0",), is_client=True),
        steps={},
        scheduler_file=None,
        has_scheduler=has_scheduler,
        cluster=SimpleNamespace(
            plan=SimpleNamespace(scheduler=SimpleNamespace(rank=0), workers=()), absent=()
        ),
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
    channels = Channels()
    rank = wind_down(channels, monkeypatch, has_scheduler=has_scheduler)
    assert channels.said[:4] == ["close-workers", "killed", "closed", "removed"]
    assert rank.coordinator is not None
    assert rank.coordinator.silent == []


def test_a_silent_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = Channels()
    channels.other = (10_000.0, channels.other[1])
    rank = wind_down(channels, monkeypatch, has_scheduler=False)
    assert rank.coordinator is not None
    assert rank.coordinator.silent == [1]


@pytest.mark.parametrize(("timeout", "slack"), [(5.0, 3.0), (10.0, 3.0), (60.0, 18.0)])
def test_a_silent_rank_is_waited_for_within_a_deadline(
    timeout: float, slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get their grace and a second; the other ranks a share of the shutdown timeout more."""
    channels = Channels()
    channels.other = (10_000.0, channels.other[1])
    wind_down(channels, monkeypatch, has_scheduler=False, shutdown_timeout=timeout)
    workers = min(2.0, timeout / 2) + 1.0
    assert channels.now == pytest.approx(workers + 500.0 + slack, abs=0.03)
    assert channels.flushed == [1.0]


def test_a_scheduler_closes_a_second_after_rank_0_has_stopped_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rank 0 does not respond: it has not released the scheduler's rank, which is another one here."""
    channels = Channels()
    channels.rank = 1
    channels.other = (1.0, Event(None, "closed", []))
    wind_down(channels, monkeypatch, has_scheduler=True)
    # workers closed at 1.0; the deadline for them is 3.0, for all ranks 3.0 more, and for the scheduler one second more
    assert channels.now == pytest.approx(500.0 + 7.0, abs=0.03)
    assert channels.said == ["close-workers", "closed", "removed", "closed"]


def test_a_scheduler_closes_once_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = Channels()
    channels.rank = 1
    channels.others = [(1.0, Event(None, "closed", [])), (2.0, Event(0, "release", None))]
    wind_down(channels, monkeypatch, has_scheduler=True)
    assert channels.now == pytest.approx(500.0 + 2.0, abs=0.03)


def test_scratch_that_can_not_be_removed_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    channels = Channels()
    stays, goes = tmp_path / "stays", tmp_path / "goes"
    stays.mkdir()
    channels.left = [str(stays), str(goes)]
    seconds: list[float] = []
    monkeypatch.setattr(end_coordinator, "remove_scratch", lambda path, *, within: seconds.append(within))
    wind_down(channels, monkeypatch, has_scheduler=False)
    assert len(seconds) == 2
    assert seconds[0] == pytest.approx(10.0 - 500.0, abs=0.03)  # this agent took all of it
    said = capsys.readouterr().err
    assert f"could not remove all of {stays} within 10 s" in said
    assert str(goes) not in said
    assert channels.left == []
