"""What the hub decides while the cluster runs and at its end, and what it tells the ranks: once."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.agent.ending import EndCoordinator
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import HostPlan, Plan, Role
from dask_gpu_mpi.startup.messages import Event, Kind
from support.mocks.inputs import worker_plan


class End:
    """A cluster of three ranks with workers on the last two; ranks close within ten seconds."""

    def __init__(
        self,
        *,
        client: int = 0,
        scheduler: int = 0,
        has_client: bool = True,
        tolerated: int = 0,
        is_owner: bool = True,
        absent: tuple[int, ...] = (),
    ) -> None:
        self.sent: list[tuple[int | None, Kind, Any]] = []
        workers = tuple(worker_plan(rank, rank=rank) for rank in (1, 2))
        hosts = tuple(HostPlan(f"h{rank}", (rank,), (), 0) for rank in range(3))
        roles = (Role(scheduler, f"h{scheduler}"), Role(client, f"h{client}"))
        self.coordinator = EndCoordinator(
            Plan("shared", 3, *roles, hosts, workers),
            lambda *message: self.sent.append(message),
            Options(tolerate_lost_ranks=tolerated, scheduler=is_owner),
            has_client=has_client,
            absent=absent,
            closing_time=10.0,
        )

    def tell(self, rank: int, kind: Kind, payload: Any = None, now: float = 0.0) -> None:
        self.coordinator.handle(Event(rank, kind, payload), now)

    def over(self, *, lost: str | None = None, final: bool = False, code: int = 0, now: float = 0.0) -> None:
        self.tell(0, Kind.OVER, (final, lost, code), now)

    def close(self, *ranks: int) -> None:
        for rank in ranks:
            self.tell(rank, Kind.CLOSED)

    @property
    def state(self) -> str:
        """How far the end has come."""
        names = ("stopped", "ended", "released", "over")
        return " ".join(each for each in names if getattr(self.coordinator, each))


STOP, RELEASE = (None, Kind.STOP, None), (0, Kind.RELEASE, None)


def ended(code: int = 0, signal: int | None = None) -> tuple[None, Kind, Any]:
    return (None, Kind.END, (code, signal))


# -- in order


def test_the_script_ends() -> None:
    """The scheduler closes after all workers, and then the job is over. What came too early counts for nothing."""
    end = End()
    end.close(0, 1, 2)
    for _ in range(2):
        end.over(final=True, code=75)
    assert end.sent == [ended(75)]
    end.close(0, 2)
    assert (end.coordinator.silent, end.state) == ([1], "ended")
    end.close(1)
    assert (end.sent[1:], end.state) == ([RELEASE], "ended released over")
    assert end.coordinator.outcome() == 0


def test_the_cluster_is_closed_first_and_every_rank_answers_twice() -> None:
    end = End()
    for _ in range(2):
        end.over()
    end.close(0, 1, 2)
    assert (end.sent, end.state) == ([STOP, RELEASE], "stopped released")
    end.over(final=True)
    end.over()
    end.close(0, 1)
    assert (end.sent[2:], end.state) == ([ended()], "stopped ended released")
    end.close(2)
    assert (end.sent[2:], end.state) == ([ended()], "stopped ended released over")


def test_what_is_for_the_scripts_rank_and_what_is_for_all() -> None:
    end = End(client=1)
    end.tell(0, Kind.CLIENT)
    end.tell(2, Kind.SIGNAL, 15)
    end.tell(1, Kind.BUSY)
    assert end.sent == [(1, Kind.CLIENT, None), (1, Kind.SIGNAL, 15), (None, Kind.BUSY, None)]


def test_without_a_script_a_signal_or_a_lost_cluster_is_the_end() -> None:
    for signal in (True, False):
        end = End(has_client=False)
        if signal:
            end.tell(2, Kind.SIGNAL, 15)
        else:
            end.over(lost="the scheduler's process ended (exit code 9)")
        end.tell(2, Kind.SIGNAL, 2)  # too late
        assert (end.sent, end.state) == ([ended(0, 15) if signal else ended(1)], "ended")


# -- lost workers, scheduler and ranks


@pytest.mark.parametrize(
    ("failed", "is_owner", "state", "lost"),
    [
        ((False, True), True, "stopped", "no worker is left"),
        ((True, False), False, "stopped", "no worker is left"),
        ((False, False), False, "stopped", None),
        ((False, False), True, "", None),
    ],
)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_worker_is_left(
    failed: tuple[bool, bool], is_owner: bool, state: str, lost: str | None, one_by_one: bool
) -> None:
    """Whether one had failed may be known already."""
    end = End(is_owner=is_owner)
    for rank in (1, 2):
        assert end.state == ""
        if one_by_one:
            end.tell(rank, Kind.WORKER_ENDED, (rank, failed[rank - 1]))
        end.tell(rank, Kind.WORKERS_ENDED, failed[rank - 1] and not one_by_one)
    assert (end.state, end.coordinator.lost) == (state, lost)
    assert end.coordinator.ended_workers == ({1: failed[0], 2: failed[1]} if one_by_one else {})


def test_a_rank_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster is lost with it, once; at the end nobody waits for it."""
    end = End()
    end.tell(2, Kind.GONE)
    text = "rank 2 on h2 lost: its process has ended"
    end.over(lost="the scheduler's process ended (exit code 9)")
    assert (end.sent, end.state, end.coordinator.lost) == ([(None, Kind.STOP, text)], "stopped", text)
    end.over(final=True)
    end.close(0)
    end.coordinator.disconnected(1, 0.0)
    assert (end.coordinator.silent, end.state) == ([], "stopped ended released over")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dask_gpu_mpi: error: {text}: the cluster is lost. Fix: ")


@pytest.mark.parametrize("stopped", [False, True])
def test_with_the_scripts_rank_the_script_is_lost(stopped: bool) -> None:
    """Nobody would send the end."""
    end = End(client=1)
    if stopped:
        end.over()
    end.tell(1, Kind.GONE)
    end.close(0, 2)
    assert [message for message in end.sent if message[1] == Kind.END] == [ended(1)]
    assert end.state == ("stopped " if stopped else "") + "ended released over"


@pytest.mark.parametrize(
    ("scheduler", "is_owner", "text"),
    [
        (1, True, "the agent of rank 1 on h1 ended, and the scheduler with it"),
        (1, False, "rank 1 on h1 lost: its processes or its node died, or its network is down"),
        (0, True, "rank 1 on h1 lost: its processes or its node died, or its network is down"),
    ],
)
def test_a_rank_whose_connection_has_ended_is_lost_with_its_agent(
    scheduler: int, is_owner: bool, text: str
) -> None:
    """So is the scheduler of this job there."""
    end = End(scheduler=scheduler, is_owner=is_owner)
    end.coordinator.disconnected(1, 5.0)
    assert end.sent == [(None, Kind.STOP, text)]
    end.coordinator.tick(1000.0)
    assert end.state == "stopped released"


def test_a_rank_that_leaves_in_order_is_not_lost() -> None:
    """It was sent a signal that the script ignores; the others continue."""
    end = End()
    end.tell(2, Kind.WORKERS_ENDED, False)
    end.tell(2, Kind.GONE)
    assert (end.sent, end.state) == ([], "")
    end.over(final=True)
    end.close(0, 1)
    assert (end.state, end.coordinator.outcome()) == ("ended released over", 0)


def test_a_rank_that_may_be_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """The others continue, and the end waits for nobody."""
    end = End(tolerated=1)
    end.tell(0, Kind.WORKERS_ENDED, True)  # rank 0, which can't be lost, has none
    for _ in range(2):
        end.tell(2, Kind.WORKERS_ENDED, True)
    (line,) = capsys.readouterr().err.splitlines()
    text = (
        "rank 2 on h2 lost: its agent, or each of its workers, died too often; it had 1 worker and 0 GPUs. Continuing with 1 "
        "worker; 0 more ranks may be lost. Fix: inspect that node, and the log file of the rank (--log-directory)"
    )
    assert line == f"dask_gpu_mpi: warning: {text}"
    assert (end.sent, end.state) == ([(0, Kind.LOST, (["2"], text))], "")
    end.tell(2, Kind.GONE)
    end.coordinator.disconnected(2, 0.0)
    end.coordinator.tick(1000.0)
    assert end.state == ""
    end.over(final=True, code=3)
    end.close(0, 1)
    assert (end.state, end.coordinator.outcome()) == ("ended released over", 0)


@pytest.mark.parametrize("absent", [True, False])
def test_too_many_lost_ranks(absent: bool) -> None:
    """Those that have never come count."""
    end = End(tolerated=1, absent=(1,) if absent else ())
    if not absent:
        end.tell(1, Kind.GONE)
    end.tell(2, Kind.GONE)
    assert (end.sent[-1][1], end.state) == (Kind.STOP, "stopped")
    assert "rank 2 on h2 lost: its process has ended; 2 ranks are lost (expected at most 1, " in str(
        end.coordinator.lost
    )


# -- ranks that do not answer


@pytest.mark.parametrize(("code", "must_be"), [(75, 75), (0, 1)])
def test_a_rank_that_does_not_close(code: int, must_be: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's code is the job's; and 0 would be no end of a job that did not come to its end."""
    end = End()
    end.over(final=True, code=code, now=5.0)
    end.close(0, 1)
    end.coordinator.tick(15.0)
    assert end.state == "ended"
    end.coordinator.tick(15.1)
    assert (end.sent[1:], end.state) == ([RELEASE], "ended released over")
    assert end.coordinator.outcome() == must_be
    (line,) = capsys.readouterr().err.splitlines()
    said = "dask_gpu_mpi: error: no response from rank 2 of 3 at the end; aborting the job. Fix: "
    assert line.startswith(said)


def test_after_a_stop_nobody_waits_for_ranks_that_do_not_close_but_the_job_goes_on() -> None:
    end = End()
    end.over(now=5.0)
    end.coordinator.tick(15.1)
    assert (end.sent, end.state) == ([STOP, RELEASE], "stopped released")
    end.over(final=True, now=100.0)
    end.coordinator.tick(110.0)
    assert end.state == "stopped ended released"
    end.coordinator.tick(110.1)
    assert end.state == "stopped ended released over"


@pytest.mark.parametrize(("closed", "code"), [((0, 1), 0), ((0,), 3)])
def test_silent_ranks_that_may_be_lost(
    closed: tuple[int, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    end = End(tolerated=1)
    end.over(final=True, code=3)
    end.close(*closed)
    end.coordinator.tick(10.1)
    assert end.coordinator.outcome() == code
    assert end.coordinator.lost_ranks == ({2} if code == 0 else set())
    error = capsys.readouterr().err
    assert ("warning: no response from rank 2 of 3 at the end; continuing without" in error) is (code == 0)
    assert ("error: no response from ranks 1-2 of 3 at the end; aborting" in error) is (code != 0)
