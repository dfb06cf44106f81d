"""One rank, from messages to its end, without processes."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.timeouts import TERM_GRACE
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.job import end_coordinator
from dask_gpu_mpi.job import member as member_module
from dask_gpu_mpi.job.ending import State
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Event


class Channels:
    """Messages of two ranks: what is to be heard, a list for each `pump`, and what was said."""

    size = 2

    def __init__(self, rank: int, heard: list[list[Event]]) -> None:
        self.rank = rank
        self.heard = heard
        self._to_self: list[Event] = []
        self.said: list[Any] = []
        self.left: list[str] = []
        self.agent = None
        self.flushed: list[float] = []
        #: Seconds for which `free` waits for the other ranks, and for rank 0; and whether this one agrees.
        self.freed: tuple[float | bool, ...] = ()
        self.mailbox = SimpleNamespace(
            flush=self._flush, free=self._free, send_all=lambda *mail: self.said.append(mail), lost=set()
        )

    def _flush(self, timeout: float) -> bool:
        self.flushed.append(timeout)
        return True

    def _free(self, *seconds: float, agrees: bool) -> None:
        self.freed = (*seconds, agrees)

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.said.append((kind, payload))
        if rank == self.rank:
            self._to_self.append(Event(rank, kind, payload))

    def events(self, timeout: float) -> list[Event]:
        events, self._to_self = self._to_self, []
        return events + (self.heard.pop(0) if self.heard else [])

    def drop_agent(self, timeout: float) -> None:
        pass


def mail(kind: str, payload: Any = None, source: int = 0) -> list[Event]:
    return [Event(source, kind, payload)]


def of_agent(kind: str, *payload: Any) -> list[Event]:
    return [Event(None, kind, list(payload))]


class Signals:
    got: tuple[int, float] | None = None
    given_back = False

    def give_back(self) -> None:
        self.given_back = True


def member(
    *heard: list[Event],
    rank: int = 1,
    leave_open: bool = False,
    has_client: bool = True,
    is_client: bool = False,
    has_scheduler: bool = False,
    environ: dict[str, str] | None = None,
) -> tuple[Member, Channels]:
    channels = Channels(rank, list(heard))
    workers = (SimpleNamespace(rank=1),)
    plan = SimpleNamespace(scheduler=SimpleNamespace(rank=0), client=SimpleNamespace(rank=1), workers=workers)
    joined: Any = SimpleNamespace(
        channels=channels,
        options=Options(shutdown_timeout=1.0),
        environ=environ or {},
        host="h1",
        start=SimpleNamespace(workers=(SimpleNamespace(name="1"),), is_client=is_client),
        scheduler_file=None,
        has_scheduler=has_scheduler,
        cluster=SimpleNamespace(plan=plan, absent=()),
    )
    signals: Any = Signals()
    return Member(joined, signals, leave_open=leave_open, has_client=has_client), channels


def test_a_rank_that_serves_until_the_end() -> None:
    rank, channels = member(mail("end", 0))
    assert rank.serve() == 0
    assert rank.ending.state is State.CLOSED
    assert ("closed", 1) in channels.said
    assert not channels.freed
    assert rank.signals.given_back  # type: ignore[attr-defined]


@pytest.mark.parametrize(("word", "freed"), [("end", True), ("stop", False)])
def test_where_the_program_goes_on(word: str, freed: bool) -> None:
    """The communicator is freed where all ranks come to the same end."""
    rank, channels = member(mail(word), leave_open=True)
    assert rank.serve() == 0
    assert channels.freed == ((3.0, 4.0, True) if freed else ())
    assert channels.flushed == [1.0, 2.0]


@pytest.mark.parametrize("has_client", [True, False])
def test_a_signal_where_the_program_goes_on_is_raised_again(
    has_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of another rank, in a job without a script; and the communicator stays, for the ends of the others."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    if has_client:
        rank, channels = member([], mail("end", 0), leave_open=True)
        rank.signals.got = (15, time.monotonic())
    else:
        heard = [mail("signal", 15, 1), [], mail("closed", 1, 1)]
        rank, channels = member(*heard, rank=0, has_client=False, is_client=True, leave_open=True)
    assert rank.serve() == 0
    assert raised == [15]
    assert rank.signals.given_back  # type: ignore[attr-defined]
    assert channels.freed[-1] is False


def test_a_signal_where_the_script_has_written_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks end with its code, where a launcher makes one of those of all."""
    monkeypatch.setattr(member_module, "is_ours", lambda number: True)
    rank, _ = member([], mail("end", 75), leave_open=True)
    rank.signals.got = (15, time.monotonic())
    with pytest.raises(SystemExit) as ended:
        rank.serve()
    assert ended.value.code == 75


def test_a_stop_and_then_the_end() -> None:
    rank, _ = member(mail("stop", "the scheduler"), [], mail("end", 0))
    assert rank.serve() == 0
    assert rank.ending.state is State.CLOSED_AFTER_STOP
    assert rank.ending.lost is None  # the client says it


def test_the_client_hears_why() -> None:
    rank, _ = member(mail("stop", "the scheduler"), is_client=True)
    rank.pump(0.0)
    assert (rank.ending.state, rank.ending.lost) == (State.STOPPED, "the scheduler")


def test_a_signal_while_nobody_answers() -> None:
    rank, _ = member()
    rank.signals.got = (15, time.monotonic() - TERM_GRACE - 1)
    assert rank.serve() == 143
    assert rank.ending.state is State.LEFT


def test_a_signal_while_the_script_is_busy() -> None:
    """Its `finally` runs: the end is told."""
    rank, _ = member(mail("busy"), [], [], mail("end", 0))
    rank.signals.got = (15, time.monotonic() - TERM_GRACE - 1)
    assert rank.serve() == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_job_without_a_script_is_ended_by_a_signal_to_any_rank(elsewhere: bool) -> None:
    rank, channels = member(rank=0, has_client=False, is_client=True)
    if elsewhere:
        channels.heard.append(mail("signal", 2, 1))
    else:
        rank.signals.got = (2, time.monotonic())
    channels.heard.append([])
    channels.heard.append(mail("closed", 1, 1))
    assert rank.serve() == 130
    assert ("end", 0) in channels.said


def test_a_signal_is_reported_once_and_the_end_awaited() -> None:
    rank, channels = member([], [], [], mail("end", 0))
    rank.signals.got = (15, time.monotonic() - TERM_GRACE + 0.5)
    assert rank.serve() == 0
    assert [said for said in channels.said if said[0] == "signal"] == [("signal", 15)]


def test_the_client_is_told_of_a_signal_to_another_rank() -> None:
    rank, channels = member(mail("signal", 15, 2), rank=0)  # whose script is on rank 1
    rank.pump(0.0)
    assert channels.said == [("signal", 15)]
    assert rank.signal_relay.for_script is None
    rank, channels = member(mail("signal", 15), is_client=True)
    rank.pump(0.0)
    assert channels.said == []
    assert rank.signal_relay.for_script == 15


@pytest.mark.parametrize("leave_open", [False, True], ids=["command", "execute"])
def test_rank_0_of_a_job_without_a_script_loses_its_scheduler(
    leave_open: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = [of_agent("scheduler-ended", 9), [], mail("closed", 1, 1)]
    rank, _ = member(*heard, rank=0, has_client=False, leave_open=leave_open)
    with pytest.raises(ClusterLostError, match="exit code 9"):
        rank.serve()
    assert capsys.readouterr().err.count("the cluster is lost") == 1


def test_busy_is_told_once() -> None:
    rank, channels = member()
    rank.signal_relay.script_is_interrupted()
    rank.pump(0.0)
    rank.pump(0.0)
    assert channels.said == [("busy", None)]


@pytest.mark.parametrize(
    ("final", "word", "state"),
    [(True, "end", State.CLOSED), (False, "stop", State.STOPPED_AND_CLOSED), (False, "end", State.CLOSED)],
)
def test_the_client_elsewhere_waits_for_rank_0(final: bool, word: str, state: State) -> None:
    rank, channels = member([], mail(word), is_client=True)
    rank.client_done(final=final)
    assert rank.ending.state is state
    assert channels.said[0] == ("over", (final, None, 0))


def test_the_client_elsewhere_leaves_where_rank_0_does_not_answer() -> None:
    rank, channels = member(is_client=True)
    channels.events = lambda timeout: time.sleep(0.05) or []  # type: ignore[method-assign, func-returns-value]
    rank.client_done(final=True)
    assert rank.ending.state is State.LEFT


def test_nobody_listens_any_more() -> None:
    rank, channels = member(mail("stop"), is_client=True, leave_open=True)
    rank.pump(0.0)
    rank.client_done(final=True)
    assert "over" not in [said[0] for said in channels.said]
    assert not channels.freed


@pytest.mark.parametrize(
    ("has_scheduler", "taken", "said"),
    [
        (True, False, "the agent of rank 1 on h1 ended (killed), and the scheduler with it"),
        (False, True, "the agent of rank 1 on h1 ended (killed)"),
        (False, False, None),
    ],
)
def test_a_lost_agent(has_scheduler: bool, taken: bool, said: str | None) -> None:
    rank, channels = member(of_agent("agent-lost", "killed", taken), has_scheduler=has_scheduler)
    rank.pump(0.0)
    assert channels.said == ([] if said is None else [("over", (False, said, 0))])
    assert (rank._restarts.due is not None) is (said is None)
    assert rank.descriptors_lost is taken


def test_what_an_agent_says_after_the_end_is_no_news() -> None:
    rank, channels = member(mail("stop"), of_agent("agent-lost", "killed", False))
    rank.pump(0.0)
    rank.pump(0.0)
    assert channels.said == []
    assert rank._restarts.due is None


@pytest.mark.parametrize("launched", [False, True])
def test_the_launcher(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    rank, _ = member(environ=environ if launched else {})
    assert not rank.launcher_gone()
    monkeypatch.setattr(os, "getppid", lambda: 0)  # of no process
    assert rank.launcher_gone() is launched


@pytest.mark.parametrize("answers", [True, False])
def test_rank_0_waits_once_more_for_a_client_that_ends_after_its_cluster(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script continues after a stop, and closes its part only at its end."""
    aborts: list[int] = []
    monkeypatch.setattr(end_coordinator, "abort", aborts.append)
    rank, channels = member(rank=0)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def events(timeout: float) -> list[Event]:
        now[0] += timeout
        found, channels._to_self = channels._to_self, []
        return found + (channels.heard.pop(0) if channels.heard else [])

    monkeypatch.setattr(channels, "events", events)
    channels.heard.append(mail("over", (False, None, 0), 1))
    rank.pump(0.0)
    rank.pump(0.0)
    rank.leave()
    assert rank.ending.state is State.STOPPED_AND_CLOSED
    assert aborts == []
    channels.heard.append(mail("over", (True, None, 0), 1))
    rank.pump(0.0)
    if answers:
        channels.heard += [[], mail("closed", 1, 1)]
    since = now[0]
    rank.leave()
    assert aborts == ([] if answers else [1])
    # the shutdown timeout, and a second
    assert now[0] - since == pytest.approx(0.02 if answers else 2.0, abs=0.015)


@pytest.mark.parametrize(("passed", "leaves"), [(4.9, False), (5.1, True)])
def test_a_rank_leaves_five_seconds_after_a_signal(passed: float, leaves: bool) -> None:
    rank, _ = member()
    assert rank.signal_relay.leaves(15, time.monotonic() - passed) is leaves


@pytest.mark.parametrize(
    ("failed", "tried", "said"),
    [
        (False, 1, []),
        (True, 0, ["the agent of rank 1 on h1 failed (why); restarting it in 0.5 s"]),
        (True, 1, ["the agent of rank 1 on h1 failed (why); restarting it in 2 s"]),
    ],
)
def test_an_agent_that_fails(
    failed: bool, tried: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rank, _ = member(of_agent("failed", "why", 1) if failed else [])
    rank._restarts.tried = tried
    rank.pump(0.0)
    assert capsys.readouterr().err.splitlines() == [f"dask_gpu_mpi: {line}" for line in said]


def test_a_worker_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rank, channels = member(of_agent("worker-ended", "1-0", "five deaths"), of_agent("workers-ended", True))
    rank.pump(0.0)
    rank.pump(0.0)
    said = "dask_gpu_mpi: worker 1-0 on h1 removed: five deaths; continuing with the other workers\n"
    assert capsys.readouterr().err == said
    assert channels.said == [("workers-ended", (1, True))]


def test_an_agent_whose_workers_have_all_ended_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """They were removed, or retired: another agent would bring them back."""
    rank, channels = member(
        of_agent("worker-ended", "1", None),
        of_agent("workers-ended", False),
        of_agent("agent-lost", "x", False),
    )
    for _ in range(3):
        rank.pump(0.0)
    assert rank._restarts.due is None
    assert capsys.readouterr().err == ""
    assert channels.said == [("workers-ended", (1, False))]


@pytest.mark.parametrize(("code", "lost"), [(0, None), (9, "the scheduler's process ended (exit code 9)")])
def test_the_schedulers_end(code: int, lost: str | None) -> None:
    rank, channels = member(of_agent("scheduler-ended", code))
    rank.pump(0.0)
    assert channels.said == [("over", (False, lost, 0))]
