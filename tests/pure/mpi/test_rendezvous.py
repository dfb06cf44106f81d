"""Ranks that come together, and those that do not, on a communicator without MPI."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import StartupError
from dask_gpu_mpi.mpi import rendezvous
from dask_gpu_mpi.mpi.rendezvous import DEADLINE, Rendezvous, missing_ranks


class Status:
    source = -1

    def Get_source(self) -> int:
        return self.source


class Comm:
    """One rank's; what the others have sent to rank 0 is there from the beginning."""

    def __init__(
        self, rank: int, size: int, mails: dict[int, Any] | None = None, *, comes: bool = True
    ) -> None:
        self.rank, self.size, self.comes = rank, size, comes
        self.mails = list((mails or {}).items())
        self.sent: list[Any] = []

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Idup(self) -> tuple[str, Any]:
        return "duplicate", SimpleNamespace(Test=lambda: self.comes)

    def isend(self, message: Any, *, dest: int, tag: int) -> Any:
        assert dest == 0
        self.sent.append(message)
        return SimpleNamespace(Test=lambda: self.comes)

    def improbe(self, *, tag: int, status: Status) -> Any:
        if not self.mails:
            return None
        status.source, message = self.mails.pop(0)
        return SimpleNamespace(recv=lambda: message)


class Clock:
    """`time`, which only a sleep moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(Status=Status)))  # type: ignore[arg-type]
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "neighbours", lambda pid: {0: "there", 2: "stopped"})
    monkeypatch.setattr(rendezvous, "allocated_hosts", lambda: "")
    return clock


def meeting(comm: Comm, deadline: float = 100.0, failure: Failure | None = None) -> Rendezvous:
    return Rendezvous(comm, f"h{comm.rank}", deadline, DEADLINE, lambda: failure)


def test_all_come() -> None:
    zero = meeting(Comm(0, 3, {1: ("h1", {}), 2: ("h2", {})}), 130)
    assert zero.duplicate() == "duplicate"
    assert zero.hosts == {0: "h0", 1: "h1", 2: "h2"}
    comm = Comm(1, 3)
    assert meeting(comm, 130).duplicate() == "duplicate"
    assert comm.sent == [("h1", {})]


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.5), (1, 2.5)])
def test_until_when_a_rank_waits(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, rank: int, seconds: float
) -> None:
    """Rank 0 until those beside a missing rank have named it; the others until rank 0 has reported."""
    named: list[float] = []
    monkeypatch.setattr(rendezvous, "neighbours", lambda pid: named.append(clock.now) or {})
    with pytest.raises(StartupError):
        meeting(Comm(rank, 2, comes=False), 107.0).duplicate()
    assert 107.0 + seconds < clock.now <= 107.0 + seconds + 0.02
    assert 107.0 < named[0] <= 107.02
    assert clock.slept[:7] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]


def test_a_rank_that_comes_late_is_none_that_is_missing(clock: Clock) -> None:
    comm = Comm(0, 2)
    late = meeting(comm, 107.0)
    comm.improbe = lambda **_: None  # type: ignore[method-assign]
    sleep = clock.sleep

    def come(seconds: float) -> None:
        sleep(seconds)
        if clock.now > 107.4:
            late.hosts[1] = "h1"

    clock.sleep = come  # type: ignore[method-assign]
    assert late.duplicate() == "duplicate"


def test_rank_0_waits_for_every_host() -> None:
    """MPI may have duplicated the communicator before the last message is here."""
    with pytest.raises(StartupError, match="no response from rank 2 of 3"):
        meeting(Comm(0, 3, {1: ("h1", {})})).duplicate()


def test_rank_0_names_the_missing_as_others_see_them() -> None:
    with pytest.raises(StartupError) as caught:
        meeting(Comm(0, 5, {1: ("h1", {3: "there"}), 4: ("h1", {})}, comes=False)).duplicate()
    assert str(caught.value).startswith(
        f"no response from ranks 2-3 of 5 before {DEADLINE} (rank 2 on h0 is stopped, rank 3 on h1 runs, but not in MPI); "
        "rank 0 on h0, ranks 1,4 on h1 responded. Fix: "
    )
    assert caught.value.fatal
    assert not caught.value.reported


@pytest.mark.parametrize("rank", [1, 2])
def test_others_report_where_rank_0_is_missing(rank: int) -> None:
    comm = Comm(rank, 3, comes=False)
    with pytest.raises(StartupError) as caught:
        meeting(comm).duplicate()
    assert comm.sent == [(f"h{rank}", {}), (f"h{rank}", {0: "there", 2: "stopped"})]
    assert f"rank 0 of 3 before {DEADLINE} (rank 0 on h{rank} runs, but not in MPI). Fix: " in str(
        caught.value
    )
    assert caught.value.fatal
    assert caught.value.reported is (rank > 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted(clock: Clock, rank: int) -> None:
    with pytest.raises(Exception, match="SIGTERM came") as caught:
        meeting(Comm(rank, 2, comes=False), 130, Failure("SIGTERM came", 143)).duplicate()
    assert caught.value.fatal  # type: ignore[attr-defined]
    assert clock.slept == [0.5] * rank  # rank 0 reports for all, if it was interrupted as well


@pytest.mark.parametrize(
    ("known", "named", "allocated"),
    [(0, 0, True), (1, 1, True), (8, 8, False), (9, 8, False)],
)
def test_many_that_are_missing(known: int, named: int, allocated: bool) -> None:
    missing = range(1, max(known, 2) + 1)
    beside = dict.fromkeys(missing[:known], ("h", "stopped"))
    text = missing_ranks(missing, 20, "the end", beside, {}, "h[0-9]")
    assert text.count(" on h is stopped") == named
    assert ("and others" in text) is (known > 8)
    assert ("; the job's nodes are h[0-9]. Fix:" in text) is (allocated and known < 2)
    assert "responded" not in text
