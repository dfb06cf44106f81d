"""Ranks that come together, and those that do not, on a communicator without MPI."""

from __future__ import annotations

import sys
import time
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


@pytest.fixture(autouse=True)
def _quick_and_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(Status=Status)))  # type: ignore[arg-type]
    monkeypatch.setattr(rendezvous, "NAMING", 0.02)
    monkeypatch.setattr(rendezvous, "RANK_0_GRACE", 0.1)
    monkeypatch.setattr(rendezvous, "neighbours", lambda pid: {0: "there", 2: "stopped"})
    monkeypatch.setattr(rendezvous, "allocated_hosts", lambda: "")


def meeting(comm: Comm, seconds: float = 0.0, failure: Failure | None = None) -> Rendezvous:
    return Rendezvous(comm, f"h{comm.rank}", time.monotonic() + seconds, DEADLINE, lambda: failure)


def test_all_come() -> None:
    zero = meeting(Comm(0, 3, {1: ("h1", {}), 2: ("h2", {})}), 30)
    assert zero.duplicate() == "duplicate"
    assert zero.hosts == {0: "h0", 1: "h1", 2: "h2"}
    comm = Comm(1, 3)
    assert meeting(comm, 30).duplicate() == "duplicate"
    assert comm.sent == [("h1", {})]


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
    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        meeting(comm).duplicate()
    assert time.monotonic() - began > 0.12
    assert comm.sent == [(f"h{rank}", {}), (f"h{rank}", {0: "there", 2: "stopped"})]
    assert f"rank 0 of 3 before {DEADLINE} (rank 0 on h{rank} runs, but not in MPI). Fix: " in str(
        caught.value
    )
    assert caught.value.fatal
    assert caught.value.reported is (rank > 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(rendezvous.time, "sleep", slept.append)
    with pytest.raises(Exception, match="SIGTERM came") as caught:
        meeting(Comm(rank, 2, comes=False), 30, Failure("SIGTERM came", 143)).duplicate()
    assert caught.value.fatal  # type: ignore[attr-defined]
    assert slept == [rendezvous.INTERRUPTED_GRACE] * rank


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
