"""What rank 0 decides at the end, and what it tells the others: once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import ending
from dask_gpu_mpi.job.ending import EndCoordinator, Ending
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import HostPlan, Plan, Role
from support.mocks.clocks import Clock
from support.mocks.inputs import worker_plan


class Rank0:
    """Rank 0 of three, with workers on the last two."""

    def __init__(self, *, has_client: bool = True, **options: Any) -> None:
        self.said: list[Any] = []
        channels = SimpleNamespace(
            size=3,
            mailbox=SimpleNamespace(
                send_all=lambda *message: self.said.append(message),
                lost=set(),
                give_up_sending=lambda: self.said.append("given up"),
            ),
            send=lambda *message: self.said.append(message),
            order=lambda *order: self.said.append(order),
        )
        self.lost: set[int] = channels.mailbox.lost
        workers = tuple(worker_plan(rank, rank=rank) for rank in (1, 2))
        hosts = tuple(HostPlan(f"h{rank}", (rank,), (), 0) for rank in range(3))
        plan = Plan("shared", 3, Role(1, "h1"), Role(0, "h0"), hosts, workers)
        joined: Any = SimpleNamespace(
            channels=channels,
            cluster=SimpleNamespace(plan=plan, absent=()),
            options=Options(shutdown_timeout=1.0, **options),
        )
        self.ending = Ending()
        self.end = EndCoordinator(joined, self.ending, has_client=has_client)

    @property
    def state(self) -> str:
        """How far its end has come."""
        return " ".join(each for each in ("stopped", "ended") if getattr(self.ending, each))

    def finish(self, *closed: int, code: int = 0, flushed: bool = True) -> None:
        """The script has ended with this code, these ranks have closed, and so does this one."""
        self.end.end_cluster(final=True, code=code)
        for rank in closed:
            self.end.on_message("closed", rank)
        self.end.finish(flushed=flushed, final=True)


def test_a_stop_and_then_the_end_each_once() -> None:
    rank = Rank0()
    for _ in range(2):
        rank.end.end_cluster(final=False)
    assert (rank.said, rank.state) == ([("stop", None)], "stopped")
    for final in (True, True, False):
        rank.end.end_cluster(final=final)
    assert (rank.said, rank.state) == ([("stop", None), ("end", 0)], "stopped ended")


@pytest.mark.parametrize("lost", [True, False])
def test_without_a_script_a_lost_cluster_or_a_signal_is_the_end(
    lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank0(has_client=False)
    if lost:
        rank.end.on_message("over", (False, "the scheduler's process ended (exit code 9)", 0))
    rank.end.end_cluster(final=True, signal=15)  # or too late
    assert (rank.said, rank.state) == ([("end", 0)], "ended")
    assert rank.ending.exit_code() == (1 if lost else 143)
    assert capsys.readouterr().err.count("the cluster is lost") == lost


def test_exit_code_of_a_rank_without_the_script() -> None:
    ending = Ending()
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)  # it leaves by itself
    ending.stopped = True
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)
    ending.ended = True
    assert (ending.exit_code(), ending.exit_code(15)) == (0, 0)
    ending.signal = 2
    assert (ending.exit_code(), ending.exit_code(15)) == (130, 130)
    ending.lost = "no worker is left"
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 1)


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
        ((False, True), False, "stopped", "no worker is left"),
        ((True, False), True, "stopped", "no worker is left"),
        ((False, False), True, "stopped", None),
        ((False, False), False, "", None),
    ],
)
def test_no_worker_is_left(failed: tuple[bool, bool], attaches: bool, state: str, lost: str | None) -> None:
    rank = Rank0(scheduler=not attaches)
    rank.end.on_message("workers-ended", (1, failed[0]))
    assert rank.state == ""
    rank.end.on_message("workers-ended", (2, failed[1]))
    assert (rank.state, rank.ending.lost) == (state, lost)


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(ending, "abort", codes.append)
    return codes


def test_who_does_not_answer_is_named(aborts: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank0()
    rank.end.release_scheduler()
    assert rank.said == [(1, "release")]
    rank.finish(0, 1)
    assert (aborts, rank.end.silent) == ([1], [2])
    (line,) = capsys.readouterr().err.splitlines()
    said = "dask_gpu_mpi: error: no response from rank 2 of 3 at the end; aborting the job. Fix: "
    assert line.startswith(said)
    rank.finish(2)
    assert (aborts, rank.end.silent) == ([1], [])
    rank.finish(flushed=False)
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
    rank.finish(code=0 if elsewhere else code)
    assert aborts == [aborted]


def test_the_mark_of_an_orderly_end(tmp_path: Path, aborts: list[int]) -> None:
    mark = tmp_path / "logs" / "ended"
    mark.parent.mkdir()
    mark.touch()  # of a job before this one
    rank = Rank0(log_directory=mark.parent)
    assert not mark.exists()
    rank.end.end_cluster(final=False)
    rank.end.leave_mark(0)
    assert not mark.exists()
    rank.finish(0, 1, 2, flushed=False)
    assert not mark.exists()
    rank.finish()
    assert mark.exists()


#: Seconds after which a rank that is not heard of counts as silent.
SILENT = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    return clock


@pytest.fixture
def finalizes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Empty while MPI is to be finalized."""
    calls: list[str] = []
    monkeypatch.setattr(ending, "do_not_finalize", lambda instead: calls.append("not finalized"))
    return calls


def test_a_rank_that_may_be_lost(
    clock: Clock, aborts: list[int], finalizes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others continue, and the end waits for nobody; the mark has the script's code."""
    rank = Rank0(tolerate_lost_ranks=1, log_directory=tmp_path)
    clock.now = SILENT
    rank.end.on_message("alive", 1)
    rank.end.on_unreachable(["1", "2"])  # rank 1 starts another agent
    assert rank.lost == {2}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "dask_gpu_mpi: warning: rank 2 on h2 lost: its processes or its node died, or its network is down; it had 1 worker and "
        "0 GPUs. Continuing with 1 worker; 0 more ranks may be lost. Fix: inspect that node, and the log file of the rank "
        "(--log-directory)"
    )
    assert rank.said == [("lost-rank", (["2"], line.removeprefix("dask_gpu_mpi: warning: ")))]
    rank.end.on_unreachable(["2"])  # reported again until the order has arrived
    assert (rank.state, capsys.readouterr().err) == ("", "")
    rank.finish(0, 1, code=3, flushed=False)  # what was sent to it does not leave
    assert (rank.end.silent, aborts, finalizes, rank.said[-1]) == ([], [], ["not finalized"], "given up")
    assert (tmp_path / "ended").read_text() == "3\n"


def test_ranks_that_are_silent_at_the_end_and_may_be_lost(
    aborts: list[int],
    finalizes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 leaves without them; as the last one, since mpirun forgets the code of an abort then, if more are silent."""
    last: list[int] = []
    monkeypatch.setattr(ending, "leave_as_the_last", last.append)
    Rank0(tolerate_lost_ranks=1).finish(0, 1, code=75, flushed=False)
    assert (aborts, finalizes, last) == ([], ["not finalized"], [])
    assert capsys.readouterr().err.count("no response from rank 2 of 3 at the end") == 1
    Rank0(tolerate_lost_ranks=1).finish(0, code=75)
    assert (aborts, last) == ([], [75])
    Rank0(tolerate_lost_ranks=1).finish(0, 1, 2, code=75, flushed=False)
    assert (aborts, last) == ([75], [75])
