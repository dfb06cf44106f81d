"""Who answered, and who is scheduler and client."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import PlacementError, WorldTooSmallException
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.roles import expected_client
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support.mocks.inputs import names, plan, rank


@pytest.mark.parametrize("size", [1, 2])
def test_layout_exclusive_needs_three_ranks(size: int) -> None:
    with pytest.raises(WorldTooSmallException, match=rf"at least 3 MPI ranks, found {size}"):
        plan(hypothetical_job(1, size, 0), layout="exclusive")


@pytest.mark.parametrize(
    ("size", "options", "scheduler", "workers"),
    [
        # without a script no rank is kept for it
        (2, {"has_client": False}, 0, [1]),
        (4, {"has_client": False}, 0, [1, 2, 3]),
        (2, {"has_client": False, "scheduler_rank": 1}, 1, [0]),
        # nor for a scheduler that is there already
        (1, {"has_client": False, "scheduler": False}, 0, [0]),
        (2, {"has_client": False, "scheduler": False, "scheduler_rank": 7}, 0, [0, 1]),
        (3, {"scheduler": False}, 0, [0, 2]),
        # both on one rank
        (3, {"scheduler_rank": 2, "client_rank": 2}, 2, [0, 1]),
    ],
)
def test_layout_exclusive_keeps_ranks_for_what_there_is(
    size: int, options: dict[str, Any], scheduler: int, workers: list[int]
) -> None:
    found = plan(hypothetical_job(1, size, 0), layout="exclusive", **options)
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
        ({"scheduler": False}, "with the client on rank 1 needs at least 2 MPI ranks"),
    ],
)
def test_layout_exclusive_has_a_worker(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WorldTooSmallException, match=said):
        plan(hypothetical_job(1, 1, 0), layout="exclusive", **options)


def test_other_ranks_for_the_roles() -> None:
    found = plan(hypothetical_job(3, 1, 0), scheduler_rank=2, client_rank=1)
    assert (found.scheduler.rank, found.scheduler.host, found.client.rank) == (2, "h3", 1)
    assert plan(hypothetical_job(3, 1, 0), layout="exclusive", scheduler_rank=1).client.rank == 0
    # scheduler and client together: two ranks do
    assert names(plan(hypothetical_job(2, 1, 0), layout="exclusive", client_rank=0)) == [1]
    for wrong in ({"client_rank": 3}, {"scheduler_rank": 7}):
        with pytest.raises(WorldTooSmallException, match="found 3"):
            plan(hypothetical_job(3, 1, 0), **wrong)


@pytest.mark.parametrize(
    ("inventories", "words"),
    [
        ([], "no inventory"),
        ([rank(0, 3), rank(2, 3)], "no inventory of rank 1 of 3"),
        ([rank(0, 2), rank(1, 2), rank(1, 2, host="h9")], r"rank 1 answered more than once, from h\[1,9\]"),
        ([rank(0, 2), rank(1, 3)], "disagree on the world size: 2, 3"),
        ([rank(0, 1), rank(1, 1)], r"ranks 0-1 answered \(expected ranks 0 to 0\)"),
    ],
)
def test_every_rank_answers_once(inventories: list[Inventory], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        plan(inventories)


def test_too_few_ranks_name_what_helps() -> None:
    with pytest.raises(
        WorldTooSmallException, match=r"found 2\. Fix: start more ranks, or take layout 'shared'"
    ):
        plan(hypothetical_job(2, 1, 0), layout="exclusive")
    with pytest.raises(
        WorldTooSmallException, match=r"found 2\. Fix: start more ranks, or lower scheduler_rank and"
    ):
        plan(hypothetical_job(2, 1, 0), scheduler_rank=2)
    with pytest.raises(WorldTooSmallException, match="with client_rank=5 needs at least 6"):
        plan(hypothetical_job(2, 1, 0), scheduler=False, has_client=False, client_rank=5)
    with pytest.raises(PlacementError, match=r"ranks -1-0 answered \(expected ranks 0 to 0\)"):
        plan([rank(-1, 1), rank(0, 1)])


def test_the_rank_that_is_expected_to_run_the_script() -> None:
    given = [{}, {"layout": "exclusive"}, {"layout": "exclusive", "scheduler_rank": 1}, {"client_rank": 3}]
    assert [expected_client(Options(**options)) for options in given] == [0, 1, 0, 3]
