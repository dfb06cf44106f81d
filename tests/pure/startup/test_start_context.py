"""The frame of a start on one rank: however it ends, its agent is ended and no other rank waits for it; and its messages."""

from __future__ import annotations

import io
import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, OptionError, Problem, StartupError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup import start_context
from dask_gpu_mpi.startup.coordinator import FailureCoordinator
from dask_gpu_mpi.startup.messages import Channels, Cluster, Kind, Registration, Start
from dask_gpu_mpi.startup.start_context import NAMED, Progress, StartContext, until_over
from support.mocks.mailboxes import MockMailbox
from support.mocks.starts import start_context as context


def test_it_shows_no_variable() -> None:
    assert "SECRET" not in repr(context(SECRET="x"))


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(start_context, "abort", codes.append)
    return codes


def test_an_error_that_is_fatal_aborts_the_job(aborts: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[float] = []
    agent: Any = SimpleNamespace(close=closed.append)
    with pytest.raises(StartupError), context().ending_in_order(agent):
        raise StartupError("nobody there", fatal=True)
    assert (aborts, closed) == ([1], [1.0])
    assert capsys.readouterr().err == "dask_gpu_mpi: error: nobody there\n"


@pytest.mark.parametrize("met", [True, False])
def test_a_defect_does_not_leave_other_ranks_waiting(met: bool, aborts: list[int]) -> None:
    around = context()
    around._has_met = met
    for error in (InputError("the others know"), KeyboardInterrupt(), ZeroDivisionError()):
        assert aborts == []
        with pytest.raises(type(error)), around.ending_in_order(None):
            raise error
    assert aborts == [1] * met


class Rank:
    """A rank that meets the others; nothing ends this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.rank, self.size = 0, size
        self.codes: list[int] = []
        self.context = context()
        monkeypatch.setattr(start_context, "Mailbox", lambda *_, **__: self)
        monkeypatch.setattr(start_context, "load_mpi", lambda *_: SimpleNamespace(COMM_WORLD="world"))
        monkeypatch.setattr(os, "_exit", self.codes.append)


@pytest.mark.parametrize("size", [1, 2])
def test_the_watchdog_of_rank_0_ends_with_the_start(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have none. That it reports: tests/faults/test_starts.py."""
    rank = Rank(monkeypatch, size)
    before = set(threading.enumerate())
    with rank.context.ending_in_order(None):
        rank.context.meet(None)
        (watchdog,) = set(threading.enumerate()) - before
    watchdog.join(10)
    rank.rank = 1
    rank.context.meet(None)
    assert set(threading.enumerate()) <= before
    assert (rank.codes, rank.context._has_met) == ([], size > 1)


def test_rank_0_that_minds_its_messages_after_the_deadline_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped for a while, with all other ranks, and goes on."""
    beats = itertools.count()
    enough = threading.Event()

    def look(_: StartContext) -> int:
        beat = next(beats)
        if beat > 20:
            enough.set()
        return beat

    rank = Rank(monkeypatch)
    rank.context.deadline, rank.context.hanging = rank.context.started - 1, 1.0
    monkeypatch.setattr(StartContext, "beats", property(look))
    monkeypatch.setattr(start_context, "ALIVE", 0.001)
    with rank.context.ending_in_order(None):
        rank.context.meet(None)
        assert enough.wait(10)
    assert rank.codes == []


# -- messages that others would have sent, with and without a part in the cluster


UP = Cluster("tls://h:1", None)
START = Start("tls://h:1", "tls", None, (), {}, limit=100.0)


class Box(MockMailbox):
    """One batch of events for each look."""

    def __init__(self, rank: int, size: int, *batches: list[Event]) -> None:
        super().__init__(rank, size)
        self.hosts = {0: "h", 1: "h1", 2: "h2"}
        self.batches = list(batches)

    def receive(self) -> list[Event]:
        return super().receive() + (self.batches.pop(0) if self.batches else [])


def serve(box: Any, around: StartContext, relay: Any = None, *, left: float | None = None) -> Any:
    """Until the start is over; on rank 0 with a coordinator that has so many seconds `left`. Events that are not read stay."""
    coordinator = None
    if left is not None:
        hosts = {rank: box.hosts[rank] for rank in range(box.size)}
        coordinator = FailureCoordinator(hosts, deadline=time.monotonic() + left)
    channels = Channels(box, None)
    result = until_over(channels, around, coordinator, relay)
    return result, channels.events(0.0)


def registered(rank: int) -> Event:
    return Event(rank, Kind.REGISTRATION, Registration("h", None, (), None, ()))


def test_a_rank_that_takes_part_goes_on() -> None:
    """Words of its agent are no messages of the coordinator."""
    later = Event(None, "workers-ended", [True])
    words = [Event(None, kind, []) for kind in (Kind.CLUSTER_UP, Kind.FAIL, Kind.START)]
    orders = [Event(0, Kind.START, START), *words]
    seen: list[Any] = []
    relay = SimpleNamespace(poll=lambda: seen.append("poll"), on_event=seen.append)
    box = Box(1, 2, [], orders, [Event(0, Kind.CLUSTER_UP, UP), later])
    assert serve(box, context(), relay) == (UP, [later])
    assert seen == ["poll", "poll", *orders, "poll"]


def test_rank_0_without_a_part_reports_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(Problem("bad option"), 2, "OptionError")
    box = Box(0, 2, [registered(1), Event(0, Kind.FAILED, failure)])
    around, said = context(), "rank 0 of 2 on h: bad option"
    with pytest.raises(OptionError, match=said) as caught:
        serve(box, around, left=30)
    assert caught.value.reported
    assert around.beats > 0  # else its watchdog takes it for one that hangs
    assert capsys.readouterr().err == f"dask_gpu_mpi: error: {said}\n"
    ((to, kind, sent),) = box.sent
    assert (to, kind, str(sent.problem), sent.kind) == (-1, Kind.FAIL, said, "OptionError")


def test_a_rank_that_does_not_answer_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    box = Box(0, 2, [registered(0)])
    with pytest.raises(StartupError, match="rank 1 of 2 on h1: no response") as caught:
        serve(box, context(), left=-1)
    assert (caught.value.fatal, caught.value.reported) == (True, False)  # reported by who aborts the job
    assert (box.sent, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize("silent", [True, False])
def test_worlds_of_one_report_once(
    silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_context.launcher_check, "wait_for_rank_0_to_report", lambda environ: silent)
    with pytest.raises(InputError, match="bad") as caught:
        serve(Box(0, 1, [Event(0, Kind.FAILED, Failure(Problem("bad"), 2))]), context(), left=30)
    assert caught.value.reported
    assert ("bad" in capsys.readouterr().err) is not silent


def test_a_signal_is_reported_once_and_every_rank_raises_the_one_report() -> None:
    failure = Failure(Problem("SIGTERM came while the cluster started"), 143)
    box = Box(1, 2, [], [], [Event(0, Kind.FAIL, failure)])
    with pytest.raises(StartupError) as caught:
        serve(box, context(signal=15))
    assert (caught.value.exit_code, caught.value.reported) == (143, True)
    assert box.sent == [(0, Kind.FAILED, failure)]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_coordinator_that_is_silent_is_not_waited_for_for_ever(rank: int) -> None:
    around = context(seconds=-31.0)
    with pytest.raises(StartupError, match="^rank 0: no response before the start-up timeout") as caught:
        serve(Box(rank, 3), around)
    assert caught.value.fatal
    assert caught.value.reported is (rank != 1)  # one rank is enough
    # a start message may give more time
    box = Box(1, 2, [Event(0, Kind.START, START)], [], [Event(0, Kind.CLUSTER_UP, UP)])
    assert serve(box, around)[0] is UP


def shown(*at: float, terminal: bool = False, planned: int | None = 64, hosts: Any = ("h17", "h18")) -> str:
    """The output by these times of a start, in which as many workers are ready as seconds have passed."""
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    progress = Progress(100.0, out)
    for now in at:
        progress.show(100.0 + now, lambda now=now: (int(now), planned, hosts))  # type: ignore[misc]
    for _ in range(2):
        progress.clear()
    return out.getvalue()


def test_a_line_every_ten_seconds_in_a_file() -> None:
    lines = shown(*(tenth / 10 for tenth in range(350))).splitlines()
    assert lines == [f"dask_gpu_mpi: {n} of 64 workers, waiting for h[17-18]" for n in (10, 20, 30)]


def test_one_line_that_changes_on_a_terminal() -> None:
    lines = [f"\r\x1b[Kdask_gpu_mpi: {n} of 64 workers, waiting for h[17-18]" for n in (0, 2)]
    assert shown(0.4, 0.5, 0.9, 2.0, terminal=True) == "".join([*lines, "\r\x1b[K"])
    assert shown(0.4, terminal=True) == ""


def test_what_is_awaited() -> None:
    assert shown(10.0, planned=None, hosts=[]) == "dask_gpu_mpi: starting, waiting for the scheduler\n"
    many = shown(10.0, hosts=[f"n{i}x{i % 7}" for i in range(99)])
    assert " and others" in many
    assert many.count(",") == NAMED
    assert " and others" not in shown(10.0, hosts=[f"n{i}x" for i in range(NAMED)])
