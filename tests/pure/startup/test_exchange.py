"""The start on one rank, by messages that others would have sent: both ways, with and without a part in the cluster."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import OptionError, PlacementError, Problem, StartupError
from dask_gpu_mpi.startup import exchange
from dask_gpu_mpi.startup.coordinator import FailureCoordinator
from dask_gpu_mpi.startup.exchange import IN_FILE, NAMED, ON_TERMINAL, Progress, until_over
from dask_gpu_mpi.startup.messages import Cluster, Event, Kind, Registration, Start
from dask_gpu_mpi.startup.start_context import Patience, StartContext
from support.mocks.starts import start_context as context

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


def registration(failure: Failure | None = None) -> Registration:
    return Registration("h", None, (), None, (), failure)


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


@pytest.mark.parametrize("relay", [Relay(), None], ids=["takes part", "reports only"])
def test_every_rank_raises_the_one_report(relay: Relay | None) -> None:
    report = Failure(Problem("no GPU"), 2, "PlacementError")
    with pytest.raises(PlacementError, match="no GPU") as caught:
        serve(Channels(1, 2, [Event(0, Kind.FAIL, report)]), context(), None, relay)
    assert caught.value.reported


def test_a_rank_without_a_part_ignores_its_agent() -> None:
    lost = Event(None, "agent-lost", ["exit code 1", False])
    channels = Channels(1, 2, [lost], [Event(0, Kind.FAIL, Failure(Problem("x"), 1))])
    with pytest.raises(StartupError):
        serve(channels, context(), None, None)
    assert channels.sent == []


def test_rank_0_without_a_part_reports_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(Problem("bad option"), 2, "OptionError")
    channels = Channels(
        0,
        2,
        [Event(1, Kind.REGISTRATION, registration()), Event(0, Kind.REGISTRATION, registration(failure))],
    )
    around = context()
    with pytest.raises(OptionError, match="rank 0 of 2 on h: bad option") as caught:
        serve(channels, around, FailureCoordinator(2, deadline=time.monotonic() + 30), None)
    assert caught.value.reported
    assert around.beats > 0  # else its watchdog takes it for one that hangs
    assert capsys.readouterr().err == "dask_gpu_mpi: error: rank 0 of 2 on h: bad option\n"
    ((kind, sent),) = channels.mailbox.to_all
    assert (kind, str(sent.problem), sent.kind) == (Kind.FAIL, "rank 0 of 2 on h: bad option", "OptionError")


def test_a_rank_that_does_not_answer_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    channels = Channels(0, 2, [Event(0, Kind.REGISTRATION, registration())])
    with pytest.raises(StartupError, match="rank 1 of 2: no response") as caught:
        serve(channels, context(), FailureCoordinator(2, deadline=time.monotonic() - 1), None)
    assert caught.value.fatal
    assert not caught.value.reported  # by who aborts the job
    assert channels.mailbox.to_all == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("silent", [True, False])
def test_worlds_of_one_report_once(
    silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange.launcher_check, "wait_for_rank_0_to_report", lambda environ: silent)
    channels = Channels(0, 1, [Event(0, Kind.REGISTRATION, registration(Failure(Problem("bad"), 2)))])
    with pytest.raises(Exception, match="bad") as caught:
        serve(channels, context(), FailureCoordinator(1, deadline=time.monotonic() + 30), None)
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
    around_rank_0 = Patience().others
    assert around_rank_0 == 30.0
    around = context(seconds=-around_rank_0 - 1)
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


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("nobody listens")


def test_a_line_every_ten_seconds_in_a_file() -> None:
    out = io.StringIO()
    progress = Progress(100.0, out)
    for tenth in range(350):
        progress.show(100.0 + tenth / 10, 42, 64, ["h17", "h18"])
    assert out.getvalue().splitlines() == ["dask_gpu_mpi: 42 of 64 workers, waiting for h[17-18]"] * 3
    assert IN_FILE == 10.0


def test_nothing_when_the_start_is_quick() -> None:
    out = io.StringIO()
    progress = Progress(0.0, out)
    progress.show(IN_FILE - 0.1, 0, 2, ["h1"])
    progress.clear()
    assert out.getvalue() == ""


def test_one_line_that_changes_on_a_terminal() -> None:
    out = Terminal()
    progress = Progress(0.0, out)
    progress.show(0.1, 0, 4, ["h1"])
    assert out.getvalue() == ""
    progress.show(ON_TERMINAL, 1, 4, ["h1"])
    progress.show(ON_TERMINAL + 0.1, 1, 4, ["h1"])
    progress.show(2 * ON_TERMINAL, 3, 4, ["h1"])
    first, second = out.getvalue().split("\r\x1b[K")[1:]
    assert first == "dask_gpu_mpi: 1 of 4 workers, waiting for h1"
    assert second == "dask_gpu_mpi: 3 of 4 workers, waiting for h1"
    progress.clear()
    assert out.getvalue().endswith("\r\x1b[K")
    before = out.getvalue()
    progress.clear()
    assert out.getvalue() == before


def told(ready: int, planned: int | None, hosts: list[str]) -> str:
    out = io.StringIO()
    Progress(0.0, out).show(IN_FILE, ready, planned, hosts)
    return out.getvalue()


def test_words() -> None:
    assert told(0, None, []) == "dask_gpu_mpi: starting, waiting for the scheduler\n"
    assert told(0, None, [""]) == "dask_gpu_mpi: starting, waiting for 1 rank that has not responded\n"
    assert told(0, None, ["", ""]) == "dask_gpu_mpi: starting, waiting for 2 ranks that have not responded\n"
    assert told(1, 3, ["h2", "", "h2"]).endswith(
        "1 of 3 workers, waiting for h2 and 1 rank that has not responded\n"
    )


def test_not_a_line_per_host() -> None:
    text = told(0, 99, [f"n{i}x{i % 7}" for i in range(99)])
    assert " and others" in text
    assert text.count(",") <= NAMED


def test_a_stream_that_is_closed_is_no_error() -> None:
    Progress(0.0, Broken()).show(99.0, 0, 1, ["h1"])
    closed = io.StringIO()
    progress = Progress(0.0, closed)
    closed.close()
    progress.show(99.0, 0, 1, ["h1"])
