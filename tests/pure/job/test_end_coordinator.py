"""What rank 0 decides at the end, and what it tells the others: once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import end_coordinator
from dask_gpu_mpi.job.end_coordinator import EndCoordinator
from dask_gpu_mpi.job.ending import Ending, State


class Rank0:
    """Rank 0 of three, with workers on the last two."""

    def __init__(
        self, *, has_client: bool = True, attaches: bool = False, log_directory: Path | None = None
    ) -> None:
        self.said: list[Any] = []
        channels = SimpleNamespace(
            size=3,
            mailbox=SimpleNamespace(send_all=lambda *message: self.said.append(message)),
            send=lambda *message: self.said.append(message),
        )
        workers = tuple(SimpleNamespace(rank=rank) for rank in (1, 2))
        self.joined: Any = SimpleNamespace(
            channels=channels,
            cluster=SimpleNamespace(plan=SimpleNamespace(workers=workers, scheduler=SimpleNamespace(rank=1))),
            options=SimpleNamespace(log_directory=log_directory, scheduler=not attaches),
        )
        self.ending = Ending()
        self.end = EndCoordinator(self.joined, self.ending, has_client=has_client)

    @property
    def state(self) -> State:
        return self.ending.state


def test_a_stop_and_then_the_end_each_once() -> None:
    rank = Rank0()
    for _ in range(2):
        rank.end.end_cluster(final=False)
    assert (rank.said, rank.state) == ([("stop", None)], State.STOPPED)
    for final in (True, True, False):
        rank.end.end_cluster(final=final)
    assert (rank.said, rank.state) == ([("stop", None), ("end", 0)], State.ENDING_AFTER_STOP)


def test_without_a_script_a_lost_cluster_is_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank0(has_client=False)
    rank.end.on_message("over", (False, "the scheduler's process ended (exit code 9)", 0))
    rank.end.end_cluster(final=True, signal=15)  # too late
    assert (rank.said, rank.state, rank.ending.exit_code()) == ([("end", 0)], State.ENDING, 1)
    assert capsys.readouterr().err.count("the cluster is lost") == 1


def test_a_signal_ends_a_job_without_a_script() -> None:
    rank = Rank0(has_client=False)
    rank.end.end_cluster(final=True, signal=15)
    assert (rank.said, rank.ending.exit_code()) == ([("end", 0)], 143)


def test_a_cluster_is_lost_once(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank0()
    rank.end.on_message("over", (False, "first", 0))
    rank.end.on_message("over", (False, "second", 0))
    assert (rank.said, rank.ending.lost) == ([("stop", "first")], "first")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dask_gpu_mpi: error: first: the cluster is lost. Fix: ")


@pytest.mark.parametrize(
    ("failed", "attaches", "state", "lost"),
    [
        ((False, True), False, State.STOPPED, "no worker is left"),
        ((True, False), True, State.STOPPED, "no worker is left"),
        ((False, False), True, State.STOPPED, None),
        ((False, False), False, State.RUNNING, None),
    ],
)
def test_no_worker_is_left(failed: tuple[bool, bool], attaches: bool, state: State, lost: str | None) -> None:
    rank = Rank0(attaches=attaches)
    rank.end.on_message("workers-ended", (1, failed[0]))
    assert rank.state is State.RUNNING
    rank.end.on_message("workers-ended", (2, failed[1]))
    assert (rank.state, rank.ending.lost) == (state, lost)


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(end_coordinator, "abort", codes.append)
    return codes


def test_who_does_not_answer_is_named(aborts: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank0()
    rank.end.end_cluster(final=True)
    for closed in (0, 1):
        rank.end.on_message("closed", closed)
    assert rank.end.silent == [2]
    rank.end.release_scheduler()
    assert rank.said[-1] == (1, "release")
    rank.end.finish(flushed=True)
    assert aborts == [1]
    (line,) = capsys.readouterr().err.splitlines()
    said = "dask_gpu_mpi: error: no response from rank 2 of 3 at the end; aborting the job. Fix: "
    assert line.startswith(said)
    rank.end.on_message("closed", 2)
    assert rank.end.silent == []
    rank.end.finish(flushed=True)
    assert aborts == [1]
    rank.end.finish(flushed=False)
    assert aborts == [1, 1]


@pytest.mark.parametrize(("code", "aborted"), [(75, 75), (0, 1)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_scripts_code_is_that_of_the_abort(
    code: int, aborted: int, elsewhere: bool, aborts: list[int]
) -> None:
    """A requeue tests for it; and 0 would be no end of a job that did not come to its end."""
    rank = Rank0()
    if elsewhere:
        rank.end.on_message("over", (True, None, code))
    else:
        rank.end.end_cluster(final=True, code=code)
    rank.end.finish(flushed=True)
    assert aborts == [aborted]


def test_the_mark_of_an_orderly_end(tmp_path: Path, aborts: list[int]) -> None:
    mark = tmp_path / "logs" / "ended"
    mark.parent.mkdir()
    mark.touch()  # of a job before this one
    rank = Rank0(log_directory=mark.parent)
    assert not mark.exists()
    rank.end.end_cluster(final=False)
    rank.end.leave_mark()
    assert not mark.exists()
    rank.end.end_cluster(final=True)
    for closed in range(3):
        rank.end.on_message("closed", closed)
    rank.end.finish(flushed=False)
    assert not mark.exists()
    rank.end.finish(flushed=True)
    assert mark.exists()
