"""Which rank gets which GPU of a host."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.plan.workers import share_cores
from support.mocks.inputs import (
    GIB,
    gpu,
    names,
    one_host,
    plan,
    rank,
)

ABC = (gpu(0), gpu(1), gpu(2))


FIVE = tuple(map(gpu, range(5)))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((FIVE, FIVE), ["0-0", "0-1", "0-2", "1-3", "1-4"]),  # an uneven number: in blocks
        ((ABC, ABC[::-1], ABC), ["0-0", "1-1", "2-2"]),  # the order of visibility does not matter
        (
            (FIVE[:2], FIVE[2:4], FIVE[:2], FIVE[2:4]),
            ["0-0", "1-2", "2-1", "3-3"],
        ),  # groups with different sets
    ],
)
def test_gpus_are_divided(seen: tuple[tuple[Gpu, ...], ...], expected: list[str]) -> None:
    assert names(plan(one_host(*seen))) == expected


def test_partial_overlap_says_who_saw_what() -> None:
    inventories = [
        rank(0, 3, ABC[:2], visible="0,1", host="n1"),
        rank(1, 3, ABC[1:], visible="1,2", host="n1"),
        rank(2, 3, ABC[:2], visible=None, host="n1"),
    ]
    with pytest.raises(PlacementError) as caught:
        plan(inventories)
    message = str(caught.value)
    for words in [
        "host n1",
        "ranks 0,2 saw GPUs 0 (GPU-0000), 1 (GPU-0001)",
        "='0,1'",
        "rank 1 saw",
        "='1,2'",
    ]:
        assert words in message
    assert "\n" not in message
    # CPU workers were asked for: nobody minds
    assert names(plan(inventories, worker_class="distributed.Nanny")) == [0, 1, 2]


def numa(count: int) -> tuple[Gpu, ...]:
    """GPUs of which the first half is near cores 0-7, the second near cores 8-15."""
    return tuple(gpu(i, cpus=tuple(range(8)) if 2 * i < count else tuple(range(8, 16))) for i in range(count))


def bound(gpus: tuple[Gpu, ...], *masks: range) -> list[Inventory]:
    return [rank(i, len(masks), gpus, cpus=tuple(mask)) for i, mask in enumerate(masks)]


LOW, HIGH = range(8), range(8, 16)


@pytest.mark.parametrize(
    ("gpus", "masks", "expected"),
    [
        (4, (LOW, HIGH), ["0-0", "0-1", "1-2", "1-3"]),
        (4, (HIGH, LOW), ["0-2", "0-3", "1-0", "1-1"]),
        (4, (LOW, HIGH, LOW, HIGH), ["0-0", "1-2", "2-1", "3-3"]),
        (2, (LOW, LOW, HIGH, HIGH), ["0-0", "2-1"]),
        (3, (HIGH, LOW), ["0-2", "1-0", "1-1"]),
        (2, (range(6), range(5, 11), range(10, 16)), ["0-0", "2-1"]),
        (4, (range(6), range(6, 11), range(11, 16)), ["0-0", "1-1", "2-2", "2-3"]),
        (3, (LOW, LOW), ["0-0", "0-1", "1-2"]),  # not bound differently: blocks
    ],
)
def test_bound_ranks_get_the_nearest_gpus(gpus: int, masks: tuple[range, ...], expected: list[str]) -> None:
    assert names(plan(bound(numa(gpus), *masks))) == expected


def test_a_gpu_near_one_rank_alone_chooses_first() -> None:
    gpus = (gpu(0, cpus=(0, 1)), gpu(1, cpus=(0,)))
    assert names(plan([rank(0, 2, gpus, cpus=(0,)), rank(1, 2, gpus, cpus=(1,))])) == ["0-1", "1-0"]


def test_even_wins_over_near() -> None:
    found = plan(bound(numa(4)[:2] + tuple(gpu(i, cpus=tuple(LOW)) for i in (2, 3)), LOW, HIGH))
    assert names(found) == ["0-0", "0-1", "1-2", "1-3"]
    (warning,) = map(str, found.warnings)
    assert "1-2 on h1 (GPU 2: 0-7), 1-3 on h1" in warning
    assert found.workers[2].cpus == tuple(HIGH)


BUSY = ((77, GIB),)


@pytest.mark.parametrize(
    ("seen", "options", "device"),
    [
        ((gpu(0), gpu(1)), {}, "GPU-0000"),
        # somebody else computes on the first one
        ((gpu(0, processes=BUSY), gpu(1)), {}, "GPU-0001"),
        ((gpu(0, uuid="MIG-a", parent="GPU-0000"),), {}, "MIG-a"),
        ((gpu(0),), {"worker_class": "distributed.Nanny"}, ""),
        ((gpu(0, exclusive=True), gpu(1)), {}, "GPU-0001"),
    ],
)
def test_the_scheduler_sees_a_gpu_of_its_rank(
    seen: tuple[Gpu, ...], options: dict[str, Any], device: str
) -> None:
    found = plan(one_host(seen), **options)
    assert found.scheduler_device == device
    assert [line for line in map(str, found.warnings) if "scheduler" in line] == []


def test_a_gpu_without_a_worker_is_the_schedulers_first_choice() -> None:
    ranks = one_host((gpu(0),), (gpu(1),), (gpu(2),))
    found = plan(ranks, layout="exclusive", scheduler_rank=1)
    assert found.scheduler_device == "GPU-0001"
    assert {worker.device for worker in found.workers} == {"GPU-0002"}


def test_a_scheduler_without_a_gpu_in_a_job_on_gpus_is_a_warning() -> None:
    found = plan([rank(0, 2, (), host="login"), rank(1, 2, (gpu(0),), host="n1")])
    assert found.scheduler_device == ""
    (line,) = [line for line in map(str, found.warnings) if "scheduler" in line]
    assert line.startswith("the scheduler (rank 0 on login) sees no GPU: graphs that hold GPU objects")
    assert "--scheduler-rank" in line
    only = plan(one_host((gpu(0, exclusive=True),)))
    assert only.scheduler_device == ""
    assert "compute mode" in str(only.warnings[-1])


# -- the cores of a host, shared between its workers


ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("masks", "quota", "threads"),
    [
        ([], None, []),
        ([ALL, ALL, ALL], None, [2, 2, 2]),
        ([(0, 1), (2, 3, 4, 5)], None, [2, 4]),
        ([()], 4.0, [1]),  # nobody knows its cores
        # a quota of a container: together no more threads, but one each
        ([ALL], 2.5, [2]),
        ([ALL], 0.5, [1]),
        ([ALL], 8.0, [8]),
        ([ALL], 64.0, [8]),
        ([ALL, ALL], 3.0, [1, 1]),
        ([(0, 1), (2, 3, 4, 5, 6, 7)], 4.0, [1, 3]),
        ([ALL] * 16, 4.0, [1] * 16),
    ],
)
def test_threads(masks: list[tuple[int, ...]], quota: float | None, threads: list[int]) -> None:
    assert share_cores(masks, quota) == threads
