"""One rank, from messages to its end, without processes."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.cluster.ending import State
from dask_gpu_mpi.cluster.member import TERM_GRACE, Member
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.events import Event


class Post:
    """Messages of two ranks: what is to be heard, a list for each `pump`, and what was said."""

    size = 2

    def __init__(self, rank: int, heard: list[list[Event]]) -> None:
        self.rank = rank
        self.heard = heard
        self.said: list[Any] = []
        self.left: list[str] = []
        self.agent = None
        self.freed = False
        self.mailbox = SimpleNamespace(
            flush=lambda timeout: True, free=self._free, send_all=lambda *mail: self.said.append(mail)
        )

    def _free(self, *_: float) -> None:
        self.freed = True

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.said.append((kind, payload))
        if rank == self.rank:
            self.heard.append([Event(rank, kind, payload)])

    def events(self, timeout: float) -> list[Event]:
        return self.heard.pop(0) if self.heard else []

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
) -> tuple[Member, Post]:
    post = Post(rank, list(heard))
    plan = SimpleNamespace(scheduler=SimpleNamespace(rank=0), workers=(SimpleNamespace(rank=1),))
    joined: Any = SimpleNamespace(
        post=post,
        options=Options(shutdown_timeout=1.0),
        environ={},
        host="h1",
        start=SimpleNamespace(workers=("1",), is_client=is_client),
        timeline=SimpleNamespace(lap=lambda name: None, add=lambda steps: None),
        steps={},
        scheduler_file=None,
        has_scheduler=has_scheduler,
        attaches=False,
        go=SimpleNamespace(plan=plan),
    )
    signals: Any = Signals()
    return Member(joined, signals, leave_open=leave_open, has_client=has_client), post


def test_a_rank_that_serves_until_the_end() -> None:
    rank, post = member(mail("end"))
    assert rank.serve() == 0
    assert rank.ending.state is State.CLOSED
    assert ("closed", (1, [])) in post.said
    assert not post.freed
    assert rank.signals.given_back  # type: ignore[attr-defined]


@pytest.mark.parametrize(("word", "freed"), [("end", True), ("stop", False)])
def test_where_the_program_goes_on(word: str, freed: bool) -> None:
    """The communicator is freed where all ranks come to the same end."""
    rank, post = member(mail(word), leave_open=True)
    assert rank.serve() == 0
    assert post.freed is freed


def test_a_stop_and_then_the_end() -> None:
    rank, _ = member(mail("stop", "the scheduler"), [], mail("end"))
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
    rank, _ = member(mail("busy"), [], [], mail("end"))
    rank.signals.got = (15, time.monotonic() - TERM_GRACE - 1)
    assert rank.serve() == 0


def test_rank_0_of_a_job_without_a_script_is_ended_by_a_signal() -> None:
    rank, post = member(rank=0, has_client=False)
    rank.signals.got = (2, time.monotonic())
    post.heard.append([])
    post.heard.append(mail("closed", (1, []), 1))
    assert rank.serve() == 130
    assert ("end",) in post.said


def test_rank_0_of_a_job_without_a_script_loses_its_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    heard = [of_agent("scheduler-ended", 9), [], mail("closed", (1, []), 1)]
    rank, _ = member(*heard, rank=0, has_client=False)
    with pytest.raises(ClusterLostError, match="exit code 9"):
        rank.serve()
    assert capsys.readouterr().err.count("the cluster is lost") == 1


def test_busy_is_told_once() -> None:
    rank, post = member()
    rank.busy = True
    rank.pump(0.0)
    rank.pump(0.0)
    assert post.said == [("busy", None)]


@pytest.mark.parametrize(
    ("final", "word", "state"),
    [(True, "end", State.CLOSED), (False, "stop", State.STOPPED_AND_CLOSED), (False, "end", State.CLOSED)],
)
def test_the_client_elsewhere_waits_for_rank_0(final: bool, word: str, state: State) -> None:
    rank, post = member([], mail(word), is_client=True)
    rank.client_done(final=final)
    assert rank.ending.state is state
    assert post.said[0] == ("over", (final, None))


def test_the_client_elsewhere_leaves_where_rank_0_does_not_answer() -> None:
    rank, post = member(is_client=True)
    post.events = lambda timeout: time.sleep(0.05) or []  # type: ignore[method-assign, func-returns-value]
    rank.client_done(final=True)
    assert rank.ending.state is State.LEFT


def test_nobody_listens_any_more() -> None:
    rank, post = member(mail("stop"), is_client=True, leave_open=True)
    rank.pump(0.0)
    rank.client_done(final=True)
    assert "over" not in [said[0] for said in post.said]
    assert not post.freed


@pytest.mark.parametrize(
    ("has_scheduler", "taken", "said"),
    [
        (True, False, "the agent of rank 1 on h1 ended (killed), and the scheduler with it"),
        (False, True, "the agent of rank 1 on h1 ended (killed)"),
        (False, False, None),
    ],
)
def test_a_lost_agent(has_scheduler: bool, taken: bool, said: str | None) -> None:
    rank, post = member(of_agent("agent-lost", "killed", taken), has_scheduler=has_scheduler)
    rank.pump(0.0)
    assert post.said == ([] if said is None else [("over", (False, said))])
    assert (rank._restarts.due is not None) is (said is None)
    assert rank.descriptors_lost is taken


def test_what_an_agent_says_after_the_end_is_no_news() -> None:
    rank, post = member(mail("stop"), of_agent("agent-lost", "killed", False))
    rank.pump(0.0)
    rank.pump(0.0)
    assert post.said == []
    assert rank._restarts.due is None


def test_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, _ = member()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not rank.launcher_gone()  # nobody has launched it
