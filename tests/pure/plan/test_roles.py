"""Who answered, and who is scheduler and client."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError, PlacementError, WorldTooSmallException
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.plan.synthetic import pretend
from inventories import names, plan, rank


@pytest.mark.parametrize("size", [1, 2])
def test_layout_exclusive_needs_three_ranks(size: int) -> None:
    with pytest.raises(WorldTooSmallException, match=rf"at least 3 MPI ranks, found {size}"):
        plan(pretend(1, size, 0), layout="exclusive")


@pytest.mark.parametrize(
    ("size", "options", "scheduler", "workers"),
    [
        # without a script no rank is kept for it
        (2, {"has_client": False}, 0, [1]),
        (4, {"has_client": False}, 0, [1, 2, 3]),
        (2, {"has_client": False, "scheduler_rank": 1}, 1, [0]),
        # nor for a scheduler that is there already
        (1, {"has_client": False, "has_scheduler": False}, 0, [0]),
        (2, {"has_client": False, "has_scheduler": False, "scheduler_rank": 7}, 0, [0, 1]),
        (3, {"has_scheduler": False}, 0, [0, 2]),
        # both on one rank
        (3, {"scheduler_rank": 2, "client_rank": 2}, 2, [0, 1]),
    ],
)
def test_layout_exclusive_keeps_ranks_for_what_there_is(
    size: int, options: dict[str, Any], scheduler: int, workers: list[int]
) -> None:
    found = plan(pretend(1, size, 0), layout="exclusive", **options)
    assert found.scheduler.rank == scheduler
    assert names(found) == workers
    assert found.client.rank == (
        scheduler if not options.get("has_client", True) else options.get("client_rank", 1)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"has_client": False}, "with the scheduler on rank 0 needs at least 2 MPI ranks, found 1"),
        ({"client_rank": 0}, "the scheduler on rank 0 and the client on rank 0 needs at least 2 MPI ranks"),
        ({"has_scheduler": False}, "with the client on rank 1 needs at least 2 MPI ranks"),
    ],
)
def test_layout_exclusive_has_a_worker(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WorldTooSmallException, match=said):
        plan(pretend(1, 1, 0), layout="exclusive", **options)


def test_other_ranks_for_the_roles() -> None:
    found = plan(pretend(3, 1, 0), scheduler_rank=2, client_rank=1)
    assert (found.scheduler.rank, found.scheduler.host, found.client.rank) == (2, "h3", 1)
    assert plan(pretend(3, 1, 0), layout="exclusive", scheduler_rank=1).client.rank == 0
    # scheduler and client together: two ranks do
    assert names(plan(pretend(2, 1, 0), layout="exclusive", client_rank=0)) == [1]
    for wrong in ({"client_rank": 3}, {"scheduler_rank": 7}):
        with pytest.raises(WorldTooSmallException, match="found 3"):
            plan(pretend(3, 1, 0), **wrong)
    with pytest.raises(OptionError):
        plan(pretend(3, 1, 0), client_rank=-1)


@pytest.mark.parametrize(
    "options", [{"layout": "x"}, {"worker_kind": "x"}, {"cpu_workers": -1}, {"nthreads": 0}]
)
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        plan(pretend(1, 1, 0), **options)


@pytest.mark.parametrize(
    ("inventories", "words"),
    [
        ([], "no rank answered"),
        ([rank(0, 3), rank(2, 3)], "rank 1 of 3 did not answer"),
        ([rank(0, 2), rank(1, 2), rank(1, 2, host="h9")], r"rank 1 answered more than once, from h\[1,9\]"),
        ([rank(0, 2), rank(1, 3)], "disagree on the world size: 2, 3"),
        ([rank(0, 1), rank(1, 1)], "ranks 0-1 answered; needed: ranks 0 to 0"),
    ],
)
def test_every_rank_answers_once(inventories: list[Inventory], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        plan(inventories)
