"""One rank, from messages to its end, without processes: what it tells whom, when it leaves, and how it gets another agent."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.timeouts import RANK_0_LOST, RANK_0_SILENT
from dask_gpu_mpi.job import ending
from dask_gpu_mpi.job import member as module
from dask_gpu_mpi.job.member import Member
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Start
from support.mocks.clocks import Clock


def silent_agent(said: list[Any]) -> Any:
    """Notes what it is sent, and never answers."""
    return SimpleNamespace(
        scratch="/scratch",
        begin=lambda options, environ, *, inspect_gpus: said.append(("begin", inspect_gpus)),
        configure=lambda options, *, speaks: said.append(("configure", speaks)),
        send=lambda order, payload=None: said.append((order, payload)),
        kill=lambda: said.append(("killed", None)),
    )


class Channels:
    """Messages of two ranks: what is to be heard, a list for each `pump` or at its time, and what was said.

    Time passes only where this rank waits, and while it removes its agent's scratch, which takes very long.
    """

    size = 2
    now = 0.0

    def __init__(self, rank: int, heard: list[list[Event]], timed: list[tuple[float, Event]]) -> None:
        self.rank, self.heard, self.timed = rank, heard, timed
        self._to_self: list[Event] = []
        self.said: list[Any] = []
        self.left: list[str] = []
        self.agent: Any = None
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

    def order(self, order: str, payload: Any = None) -> None:
        self.agent.send(order, payload)

    def events(self, timeout: float) -> list[Event]:
        Channels.now += timeout
        events, self._to_self = self._to_self, []
        events += self.heard.pop(0) if self.heard else []
        while self.timed and Channels.now > self.timed[0][0]:
            events.append(self.timed.pop(0)[1])
        return events

    def drop_agent(self, timeout: float) -> None:
        if self.agent is not None:
            self.agent = None
            self.said.append(("removed", None))
            Channels.now += 500.0

    @property
    def kinds(self) -> list[str]:
        """What was said, without what it carried."""
        return [kind for kind, _ in self.said]


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channels, "now", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: Channels.now)


def mail(kind: str, payload: Any = None, source: int = 0) -> list[Event]:
    return [Event(source, kind, payload)]


OVER = mail("closed", 1, 1)


def of_agent(kind: str, *payload: Any) -> list[Event]:
    return [Event(None, kind, list(payload))]


def member(
    *heard: list[Event],
    rank: int = 1,
    leave_open: bool = False,
    has_client: bool = True,
    is_client: bool = False,
    has_scheduler: bool = False,
    workers: str = "1",
    timed: Any = (),
    shutdown_timeout: float = 1.0,
    got: tuple[int, float] | None = None,
    environ: dict[str, str] | None = None,
) -> tuple[Member, Channels]:
    channels = Channels(rank, list(heard), list(timed))
    plan = SimpleNamespace(
        scheduler=SimpleNamespace(rank=0), client=SimpleNamespace(rank=1), workers=(SimpleNamespace(rank=1),)
    )
    own: Any = tuple(SimpleNamespace(name=name) for name in workers.split())
    joined: Any = SimpleNamespace(
        channels=channels,
        options=Options(shutdown_timeout=shutdown_timeout),
        environ=environ or {},
        host="h1",
        start=Start("tls://h:1", "tls", None, own, {"key": "secret"}, is_client=is_client),
        scheduler_file=None,
        has_scheduler=has_scheduler,
        cluster=SimpleNamespace(plan=plan, absent=()),
    )
    signals: Any = SimpleNamespace(got=got, give_back=lambda: channels.said.append(("given back", None)))
    return Member(joined, signals, leave_open=leave_open, has_client=has_client), channels


def happened(rank: Member) -> str:
    """How far its end has come."""
    return " ".join(each for each in ("stopped", "ended", "closed") if getattr(rank.ending, each))


# -- ranks without the script


@pytest.mark.parametrize(("word", "freed"), [("end", True), ("stop", False)])
def test_where_the_program_goes_on(word: str, freed: bool) -> None:
    """The communicator is freed where all ranks come to the same end."""
    rank, channels = member(mail(word), leave_open=True)
    assert rank.serve() == 0
    assert channels.freed == ((3.0, 4.0, True) if freed else ())
    assert channels.flushed == [1.0, 2.0]


@pytest.mark.parametrize(("has_client", "code"), [(True, 0), (True, 75), (False, 0)])
def test_a_signal_where_the_program_goes_on_is_raised_again(
    has_client: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of another rank, in a job without a script; and the communicator stays, for the ends of the others.

    But all ranks end with the code of a script that has written its checkpoint.
    """
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(module, "is_ours", lambda number: True)
    if has_client:
        rank, channels = member([], mail("end", code), leave_open=True, got=(15, 0.0))
    else:
        heard = [mail("signal", 15, 1), [], OVER]
        rank, channels = member(*heard, rank=0, has_client=False, is_client=True, leave_open=True)
    with pytest.raises(SystemExit, match=str(code)) if code else contextlib.nullcontext():
        assert rank.serve() == 0
    assert raised == ([] if code else [15])
    assert channels.kinds[-1] == "given back"
    assert channels.freed[-1] is False


@pytest.mark.parametrize("is_client", [False, True])
def test_a_stop_and_then_the_end(is_client: bool) -> None:
    """The client hears why, and says it; at its end nobody listens to it any more."""
    heard = [mail("stop", "the scheduler"), [], mail("end", 0)]
    rank, channels = member(*heard, is_client=is_client, leave_open=is_client)
    rank.pump(0.0)
    assert (happened(rank), rank.ending.lost) == ("stopped", "the scheduler" if is_client else None)
    if is_client:
        rank.client_done(final=True)
        assert "over" not in channels.kinds
        assert not channels.freed
    else:
        assert rank.serve() == 0
        assert happened(rank) == "stopped ended closed"


@pytest.mark.parametrize(("passed", "busy", "code"), [(4.5, False, 0), (5.1, False, 143), (5.1, True, 0)])
def test_a_rank_leaves_five_seconds_after_its_signal_if_the_script_does_not_clean_up(
    passed: float, busy: bool, code: int
) -> None:
    """It has reported the signal once, and waits for the end."""
    rank, channels = member(mail("busy") if busy else [], [], [], mail("end", 0), got=(15, -passed))
    assert rank.serve() == code
    assert channels.kinds.count("signal") == 1


# -- the client's rank


def test_the_client_elsewhere_leaves_where_rank_0_does_not_answer() -> None:
    rank, _ = member(is_client=True)
    rank.client_done(final=True)
    assert happened(rank) == "closed"
    assert Channels.now == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("answers", [True, False])
def test_rank_0_waits_once_more_for_a_client_that_ends_after_its_cluster(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script continues after a stop, and closes its part only at its end."""
    aborts: list[int] = []
    monkeypatch.setattr(ending, "abort", aborts.append)
    rank, channels = member(mail("over", (False, None, 0), 1), rank=0)
    for _ in range(2):
        rank.pump(0.0)
    rank.leave()
    assert (happened(rank), aborts) == ("stopped closed", [])
    channels.heard.append(mail("over", (True, None, 0), 1))
    rank.pump(0.0)
    channels.heard += [[], OVER if answers else []]
    since = Channels.now
    rank.leave()
    assert aborts == [1] * (not answers)
    # the shutdown timeout, and a second
    assert Channels.now - since == pytest.approx(0.02 if answers else 2.0, abs=0.015)


# -- its agent


@pytest.mark.parametrize(
    ("has_scheduler", "taken", "said"),
    [
        (True, False, "the agent of rank 1 on h1 ended (killed), and the scheduler with it"),
        (False, True, "the agent of rank 1 on h1 ended (killed)"),
        (False, False, None),
    ],
)
def test_a_lost_agent(has_scheduler: bool, taken: bool, said: str | None) -> None:
    lost = of_agent("agent-lost", "killed", taken)
    rank, channels = member(lost, has_scheduler=has_scheduler)
    rank.pump(0.0)
    assert channels.said == ([] if said is None else [("over", (False, said, 0))])
    assert (rank._restarts.due is not None, rank.descriptors_lost) == (said is None, taken)
    rank, channels = member(mail("stop"), lost, has_scheduler=has_scheduler)  # after the end it is no news
    for _ in range(2):
        rank.pump(0.0)
    assert (channels.said, rank._restarts.due) == ([], None)


@pytest.mark.parametrize("ended", [True, False])
def test_an_agent_whose_workers_have_all_ended_is_not_missed(
    ended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were removed, or retired, or there were none: another agent would bring them back."""
    heard = [of_agent("worker-ended", "1", None), of_agent("workers-ended", False)] if ended else [[], []]
    rank, channels = member(*heard, of_agent("agent-lost", "x", False), workers="1" if ended else "")
    for _ in range(3):
        rank.pump(0.0)
    assert rank._restarts.due is None
    assert capsys.readouterr().err == ""
    assert channels.said == [("workers-ended", (1, False))] * ended


def test_an_agent_that_fails_and_cannot_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another try each time, then the rank is removed; nothing is raised."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "AgentProcess", full)
    rank, channels = member(of_agent("failed", "why", 1))
    for _ in range(5):
        rank.pump(10.0)
    assert channels.said == [("workers-ended", (1, True))]
    begin, full_again = (
        "dask_gpu_mpi: the agent of rank 1 on h1",
        "could not be started (Too many open files)",
    )
    assert capsys.readouterr().err.splitlines() == [
        f"{begin} failed (why); restarting it in 0.5 s",
        *(f"{begin} {full_again}; restarting it in {seconds} s" for seconds in (2, 8)),
        f"{begin} {full_again}; rank 1 removed, continuing with the other ranks",
    ]


def test_another_agent_is_started_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the workers that have not ended for good."""
    started: list[Any] = []
    rank, channels = member(workers="1-0 1-1")
    agent, again = silent_agent(channels.said), rank._restarts
    monkeypatch.setattr(module, "AgentProcess", lambda *args: started.append(args) or agent)
    again.start_if_due()
    again.worker_ended("1-0", "five deaths")
    again.lost("it died")
    for now, begun in ((0.5, 0), (0.6, 1), (0.7, 1)):
        Channels.now = now
        again.start_if_due()
        assert len(started) == begun
    assert channels.agent is agent
    again.start_workers()
    *before, (order, start) = channels.said
    assert (before, order) == (
        [("begin", False), ("configure", False), (Order.JOINED, None)],
        Order.START_WORKERS,
    )
    assert ([worker.name for worker in start.workers], start.config) == (["1-1"], {"key": "secret"})


# -- closing: with an agent that never answers


def wind_down(rank: int = 0, **more: Any) -> tuple[list[int] | None, Channels]:
    """The ranks that are silent at the end, if rank 0 closes its part; and what was said."""
    closing, channels = member(rank=rank, is_client=True, **{"shutdown_timeout": 10.0, **more})
    channels.agent = silent_agent(channels.said)
    closing._closing.run()
    assert happened(closing) == "closed"
    return closing.coordinator and closing.coordinator.silent, channels


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_slow_rank_0_tells_first_and_still_hears_the_others(has_scheduler: bool) -> None:
    closed = [(2.0, Event(1, "closed", 1))]
    silent, channels = wind_down(timed=closed, has_scheduler=has_scheduler)
    assert channels.kinds[:4] == ["close-workers", "killed", "closed", "removed"]
    assert silent == []


@pytest.mark.parametrize(
    ("timeout", "environ", "workers", "slack"),
    [
        (3.0, {}, 2.5, 3.0),
        (10.0, {}, 3.0, 3.0),
        (60.0, {}, 3.0, 18.0),
        # with a profiler, which writes its data then, half of `shutdown_timeout`
        (10.0, {"CUDA_INJECTION64_PATH": "1"}, 6.0, 3.0),
    ],
)
def test_a_silent_rank_is_found_and_waited_for_within_a_deadline(
    timeout: float, environ: dict[str, str], workers: float, slack: float
) -> None:
    """Workers get their grace and a second; the other ranks a share of the shutdown timeout more."""
    silent, channels = wind_down(shutdown_timeout=timeout, environ=environ)
    assert Channels.now == pytest.approx(workers + 500.0 + slack, abs=0.03)
    assert (channels.flushed, silent) == ([1.0], [1])


def test_a_scheduler_closes_a_second_after_rank_0_has_stopped_waiting() -> None:
    """Where rank 0 does not respond: it has not released the scheduler's rank, which is another one here."""
    _, channels = wind_down(1, timed=[(1.0, Event(None, "closed", []))], has_scheduler=True)
    # workers closed at 1.0; the deadline for them is 3.0, for all ranks 3.0 more, and for the scheduler one second more
    assert Channels.now == pytest.approx(500.0 + 7.0, abs=0.03)
    assert channels.kinds == ["close-workers", "closed", "removed", "closed"]


def test_scratch_that_can_not_be_removed_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(ending, "remove_scratch", lambda path, *, within: seconds.append(within))
    closing, channels = member(rank=0, shutdown_timeout=10.0)
    channels.agent, channels.left = silent_agent(channels.said), [str(tmp_path), "/goes"]
    closing._closing.run()
    assert seconds == [pytest.approx(10.0 - 500.0, abs=0.03)] * 2  # this agent took all of it
    said = capsys.readouterr().err
    assert f"could not remove all of {tmp_path} within 10 s" in said
    assert "/goes" not in said
    assert channels.left == []


def test_rank_0_is_not_lost_by_one_connection_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MPICH it is silent, so that nothing else shows that it is alive; its network may be down for some seconds."""
    clock, answer = Clock(), [""]
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "connect_only", lambda host, port: answer[0])
    monkeypatch.setattr(module.random, "uniform", lambda least, most: least)
    watch = module.CoordinatorWatch("tls://h1:8786", size=2)

    def is_lost_at(seconds: float, error: str) -> bool:
        clock.now, answer[0] = seconds, error
        return watch.is_lost(has_scheduler=True)

    assert not is_lost_at(RANK_0_LOST + 1.0, "No route to host")
    assert not is_lost_at(RANK_0_LOST + 6.0, "")
    assert not is_lost_at(2 * RANK_0_LOST + 5.0, "No route to host")  # nobody tries yet
    assert not is_lost_at(2 * RANK_0_LOST + 7.0, "no answer within 5 s")
    assert is_lost_at(3 * RANK_0_LOST + 7.0, "no answer within 5 s")
    assert watch.unreachable
    watch.hear()
    assert is_lost_at(5 * RANK_0_LOST, os.strerror(errno.ECONNREFUSED))  # nothing listens there any more
    assert not watch.unreachable
    # its scheduler has been closed: it may write the report now, for a time
    heard = watch._heard
    for silence, lost in ((RANK_0_SILENT - 1.0, False), (RANK_0_SILENT + 1.0, True)):
        clock.now = heard + silence
        assert watch.is_lost(has_scheduler=False) is lost
