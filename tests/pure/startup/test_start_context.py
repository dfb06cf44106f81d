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

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, OptionError, PlacementError, Problem, StartupError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup import start_context
from dask_gpu_mpi.startup.coordinator import FailureCoordinator
from dask_gpu_mpi.startup.messages import PAYLOADS, Cluster, Kind, Registration, Start
from dask_gpu_mpi.startup.start_context import IN_FILE, NAMED, ON_TERMINAL, Progress, StartContext, until_over
from support.mocks.starts import start_context as context


class Agent:
    closed: float | None = None

    def __init__(self) -> None:
        self.orders: list[str] = []

    def send(self, order: str) -> None:
        self.orders.append(order)

    def close(self, timeout: float) -> None:
        self.closed = timeout


def test_a_signal_is_a_failure_with_its_exit_code() -> None:
    context(SECRET="x").raise_signal()
    assert "SECRET" not in repr(context(SECRET="x"))
    with pytest.raises(StartupError, match="^SIGINT came while the cluster started$") as caught:
        context(signal=2).raise_signal()
    assert caught.value.exit_code == 130


def test_an_error_that_is_fatal_aborts_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("dask_gpu_mpi.startup.start_context.abort", codes.append)
    error = StartupError("nobody there")
    error.fatal = True
    agent: Any = Agent()
    with pytest.raises(StartupError), context().ending_in_order(agent):
        raise error
    assert codes == [1]
    assert agent.closed == 1.0
    assert capsys.readouterr().err == "dask_gpu_mpi: error: nobody there\n"


@pytest.mark.parametrize("met", [True, False])
def test_a_defect_does_not_leave_other_ranks_waiting(met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("dask_gpu_mpi.startup.start_context.abort", codes.append)
    around = context()
    around._has_met = met
    with pytest.raises(ZeroDivisionError), around.ending_in_order(None):
        _ = 1 / 0
    for other in (InputError("the others know"), KeyboardInterrupt()):
        with pytest.raises(type(other)), around.ending_in_order(None):
            raise other
    assert codes == ([1] if met else [])


@pytest.mark.parametrize(("size", "given"), [(1, None), (2, "mine")])
def test_the_ranks_meet(size: int, given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        start_context, "Mailbox", lambda *args, **_: calls.append(args) or SimpleNamespace(rank=0, size=size)
    )
    monkeypatch.setattr(start_context, "load_mpi", lambda environ, host: SimpleNamespace(COMM_WORLD="world"))
    around, agent = context(), Agent()
    around.payloads, around.comm = {"later": int}, given
    with around.ending_in_order(None):
        channels = around.meet(agent)  # type: ignore[arg-type]
    assert calls == [(given or "world", around.host, around.deadline, {**PAYLOADS, "later": int})]
    assert (channels.size, channels.agent, around._has_met) == (size, agent, size > 1)
    assert agent.orders == [Order.JOINED]


class Hanging:
    """A rank 0 whose main thread may hang, and the end of its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.aborts: list[int] = []
        self.ended = threading.Event()
        self.codes: list[int] = []
        self.size = size
        monkeypatch.setattr(start_context, "abort", self.aborts.append)
        monkeypatch.setattr(start_context, "ALIVE", 0.05)
        monkeypatch.setattr(os, "_exit", self._exit)
        monkeypatch.setattr(start_context, "Mailbox", lambda *_, **__: self)
        mpi = SimpleNamespace(COMM_WORLD="world")
        monkeypatch.setattr(start_context, "load_mpi", lambda environ, host: mpi)
        self.rank = 0
        self.context = context()
        self.context.deadline = self.context.started - 1
        self.context.hanging = 1.0

    def _exit(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    def send(self, *_: Any) -> None:
        pass


def test_the_watchdog_of_rank_0_ends_with_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Hanging(monkeypatch)
    job.context.deadline += 60
    before = set(threading.enumerate())
    with job.context.ending_in_order(None):
        job.context.meet(None)
        (watchdog,) = set(threading.enumerate()) - before
    watchdog.join(10)
    assert not watchdog.is_alive()
    assert job.codes == []
    job.rank = 1  # which has none
    job.context.meet(None)
    assert set(threading.enumerate()) <= before


def test_rank_0_that_minds_its_messages_after_the_deadline_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped for a while, with all other ranks, and goes on."""
    job = Hanging(monkeypatch)
    beats = itertools.count()
    enough = threading.Event()

    def look(_: StartContext) -> int:
        beat = next(beats)
        if beat > 20:
            enough.set()
        return beat

    monkeypatch.setattr(StartContext, "beats", property(look))
    monkeypatch.setattr(start_context, "ALIVE", 0.001)
    with job.context.ending_in_order(None):
        job.context.meet(None)
        assert enough.wait(10)
    assert job.codes == []


# -- messages that others would have sent, with and without a part in the cluster


UP = Cluster("tls://h:1", None)
START = Start("tls://h:1", "tls", None, (), {}, limit=100.0)


class Mailbox:
    def __init__(self) -> None:
        self.to_all: list[tuple[str, Any]] = []

    def send_all(self, kind: str, payload: Any = None) -> None:
        self.to_all.append((kind, payload))

    def flush(self, timeout: float) -> bool:
        return True


class Channels:
    """One batch of events for each look; what the rank sends to itself comes with the next."""

    def __init__(self, rank: int, size: int, *batches: list[Event]) -> None:
        self.rank, self.size = rank, size
        self.mailbox = Mailbox()
        self.batches = list(batches)
        self.sent: list[tuple[int, str, Any]] = []
        self.pushed_back: list[Event] = []

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.sent.append((rank, kind, payload))
        if rank == self.rank:
            self.batches.insert(0, [Event(rank, kind, payload)])

    def events(self, timeout: float) -> list[Event]:
        return self.batches.pop(0) if self.batches else []

    def push_back(self, events: list[Event]) -> None:
        self.pushed_back = events


class Relay:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.polls = 0

    def poll(self) -> None:
        self.polls += 1

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def serve(channels: Any, around: StartContext, coordinator: FailureCoordinator | None, relay: Any) -> Cluster:
    return until_over(channels, around, coordinator, relay)


REGISTRATION = Registration("h", None, (), None, ())


def test_a_rank_that_takes_part_goes_on() -> None:
    later = Event(None, "workers-ended", [True])
    agents = Event(None, "ready", [1, []])
    channels = Channels(
        1, 2, [], [Event(0, Kind.START, START), agents], [Event(0, Kind.CLUSTER_UP, UP), later]
    )
    relay = Relay()
    assert serve(channels, context(), None, relay) is UP
    assert relay.events == [Event(0, Kind.START, START), agents]
    assert relay.polls == 3
    assert channels.pushed_back == [later]


def test_words_of_the_agent_are_no_messages_of_the_coordinator() -> None:
    words = [Event(None, kind, []) for kind in (Kind.CLUSTER_UP, Kind.FAIL, Kind.START)]
    relay = Relay()
    serve(Channels(1, 2, words, [Event(0, Kind.CLUSTER_UP, UP)]), context(), None, relay)
    assert relay.events == words


def test_every_rank_raises_the_one_report() -> None:
    report = Failure(Problem("no GPU"), 2, "PlacementError")
    with pytest.raises(PlacementError, match="no GPU") as caught:
        serve(Channels(1, 2, [Event(0, Kind.FAIL, report)]), context(), None, None)
    assert caught.value.reported


def test_rank_0_without_a_part_reports_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(Problem("bad option"), 2, "OptionError")
    channels = Channels(
        0,
        2,
        [Event(1, Kind.REGISTRATION, REGISTRATION), Event(0, Kind.FAILED, failure)],
    )
    around = context()
    with pytest.raises(OptionError, match="rank 0 of 2 on h: bad option") as caught:
        serve(channels, around, FailureCoordinator({0: "h", 1: "h1"}, deadline=time.monotonic() + 30), None)
    assert caught.value.reported
    assert around.beats > 0  # else its watchdog takes it for one that hangs
    assert capsys.readouterr().err == "dask_gpu_mpi: error: rank 0 of 2 on h: bad option\n"
    ((kind, sent),) = channels.mailbox.to_all
    assert (kind, str(sent.problem), sent.kind) == (Kind.FAIL, "rank 0 of 2 on h: bad option", "OptionError")


def test_a_rank_that_does_not_answer_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    channels = Channels(0, 2, [Event(0, Kind.REGISTRATION, REGISTRATION)])
    with pytest.raises(StartupError, match="rank 1 of 2 on h1: no response") as caught:
        serve(channels, context(), FailureCoordinator({0: "h", 1: "h1"}, deadline=time.monotonic() - 1), None)
    assert caught.value.fatal
    assert not caught.value.reported  # by who aborts the job
    assert channels.mailbox.to_all == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("silent", [True, False])
def test_worlds_of_one_report_once(
    silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_context.launcher_check, "wait_for_rank_0_to_report", lambda environ: silent)
    channels = Channels(0, 1, [Event(0, Kind.FAILED, Failure(Problem("bad"), 2))])
    with pytest.raises(Exception, match="bad") as caught:
        serve(channels, context(), FailureCoordinator({0: "h"}, deadline=time.monotonic() + 30), None)
    assert caught.value.reported  # type: ignore[attr-defined]
    assert ("bad" in capsys.readouterr().err) is not silent


def test_a_signal_is_reported_once() -> None:
    channels = Channels(1, 2, [], [], [Event(0, Kind.FAIL, Failure(Problem("SIGTERM"), 143))])
    with pytest.raises(StartupError) as caught:
        serve(channels, context(signal=15), None, Relay())
    assert caught.value.exit_code == 143
    assert channels.sent == [
        (0, Kind.FAILED, Failure(Problem("SIGTERM came while the cluster started"), 143))
    ]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_coordinator_that_is_silent_is_not_waited_for_for_ever(rank: int) -> None:
    around = context(seconds=-31.0)
    with pytest.raises(StartupError, match="^rank 0: no response before the start-up timeout") as caught:
        serve(Channels(rank, 3), around, None, None)
    assert caught.value.fatal
    assert caught.value.reported is (rank != 1)  # one rank is enough
    # a start message may give more time
    channels = Channels(1, 2, [Event(0, Kind.START, START)], [], [Event(0, Kind.CLUSTER_UP, UP)])
    assert serve(channels, around, None, Relay()) is UP


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_ten_seconds_in_a_file() -> None:
    out = io.StringIO()
    progress = Progress(100.0, out)
    for tenth in range(350):
        progress.show(100.0 + tenth / 10, lambda: (42, 64, ["h17", "h18"]))
    assert out.getvalue().splitlines() == ["dask_gpu_mpi: 42 of 64 workers, waiting for h[17-18]"] * 3
    assert IN_FILE == 10.0


def test_one_line_that_changes_on_a_terminal() -> None:
    out = Terminal()
    progress = Progress(0.0, out)
    for now, ready in ((0.1, 0), (ON_TERMINAL, 1), (ON_TERMINAL + 0.1, 2), (2 * ON_TERMINAL, 3)):
        progress.show(now, lambda ready=ready: (ready, 4, ["h1"]))  # type: ignore[misc]
    lines = "".join(f"\r\x1b[Kdask_gpu_mpi: {ready} of 4 workers, waiting for h1" for ready in (1, 3))
    assert out.getvalue() == lines
    progress.clear()
    progress.clear()
    assert out.getvalue() == lines + "\r\x1b[K"


def test_what_is_awaited() -> None:
    def told(planned: int | None, hosts: list[str]) -> str:
        out = io.StringIO()
        progress = Progress(0.0, out)
        progress.show(IN_FILE, lambda: (0, planned, hosts))
        progress.clear()
        return out.getvalue()

    assert told(None, []) == "dask_gpu_mpi: starting, waiting for the scheduler\n"
    many = told(99, [f"n{i}x{i % 7}" for i in range(99)])
    assert " and others" in many
    assert many.count(",") <= NAMED
