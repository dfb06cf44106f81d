"""Which rank gets which GPU of a host; names, cores, threads and memory of workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine import Gpu, inventory
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.plan.workers import excess_warnings, gpus_of_host, share_cores
from support.mocks.inputs import GIB, gpu, names, one_host, plan, rank

#: Nodes of the size that the expectations below are for.
hypothetical_job = partial(inventory.hypothetical_job, memory_per_node=256 * GIB)

FIVE = tuple(map(gpu, range(5)))
ABC = FIVE[:3]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((FIVE, FIVE), ["0-0", "0-1", "0-2", "1-3", "1-4"]),  # an uneven number: in blocks
        ((ABC, ABC[::-1], ABC), ["0-0", "1-1", "2-2"]),  # the order of visibility does not matter
        ((FIVE[:2], FIVE[2:4], FIVE[:2], FIVE[2:4]), ["0-0", "1-2", "2-1", "3-3"]),  # groups with different sets
    ],
)  # fmt: skip
def test_gpus_are_divided(seen: tuple[tuple[Gpu, ...], ...], expected: list[str]) -> None:
    assert names(plan(one_host(*seen))) == expected


def test_partial_overlap_says_who_saw_what() -> None:
    inventories = [
        rank(number, 3, gpus, visible=visible, host="n1")
        for number, (gpus, visible) in enumerate([(ABC[:2], "0,1"), (ABC[1:], "1,2"), (ABC[:2], None)])
    ]
    with pytest.raises(PlacementError) as caught:
        plan(inventories)
    message = str(caught.value)
    assert "host n1" in message
    assert (
        "ranks 0,2 saw GPUs 0 (GPU-0000), 1 (GPU-0001) [CUDA_VISIBLE_DEVICES ='0,1']; rank 1 saw" in message
    )
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
        (numa(4), (LOW, HIGH), ["0-0", "0-1", "1-2", "1-3"]),
        (numa(4), (HIGH, LOW), ["0-2", "0-3", "1-0", "1-1"]),
        (numa(4), (LOW, HIGH, LOW, HIGH), ["0-0", "1-2", "2-1", "3-3"]),
        (numa(2), (LOW, LOW, HIGH, HIGH), ["0-0", "2-1"]),
        (numa(3), (HIGH, LOW), ["0-2", "1-0", "1-1"]),
        (numa(2), (range(6), range(5, 11), range(10, 16)), ["0-0", "2-1"]),
        (numa(4), (range(6), range(6, 11), range(11, 16)), ["0-0", "1-1", "2-2", "2-3"]),
        (numa(3), (LOW, LOW), ["0-0", "0-1", "1-2"]),  # not bound differently: blocks
        # a GPU that is near one rank alone chooses first
        ((gpu(0, cpus=(0, 1)), gpu(1, cpus=(0,))), (range(1), range(1, 2)), ["0-1", "1-0"]),
    ],
)
def test_bound_ranks_get_the_nearest_gpus(
    gpus: tuple[Gpu, ...], masks: tuple[range, ...], expected: list[str]
) -> None:
    assert names(plan(bound(gpus, *masks))) == expected


def test_even_wins_over_near() -> None:
    found = plan(bound(numa(4)[:2] + tuple(gpu(i, cpus=tuple(LOW)) for i in (2, 3)), LOW, HIGH))
    assert names(found) == ["0-0", "0-1", "1-2", "1-3"]
    (warning,) = map(str, found.warnings)
    assert "get the ranks' cores: 1-2 on h1 (GPU 2: 0-7), 1-3 on h1 (GPU 3: 0-7). Fix" in warning
    assert found.workers[2].cpus == tuple(HIGH)


CPUS = st.sets(st.integers(0, 7), min_size=1).map(lambda cpus: tuple(sorted(cpus)))


@settings(max_examples=60, deadline=None)
@given(st.lists(CPUS, min_size=1, max_size=6), st.lists(CPUS, min_size=1, max_size=8))
def test_shares_differ_by_one_at_most_however_ranks_are_bound(
    masks: list[tuple[int, ...]], near: list[tuple[int, ...]]
) -> None:
    gpus = tuple(gpu(i, cpus=cpus) for i, cpus in enumerate(near))
    found = plan([rank(i, len(masks), gpus, cpus=mask) for i, mask in enumerate(masks)])
    shares = [len(found.for_rank(number)) for number in range(len(masks))]
    assert sum(shares) == len(gpus)
    assert max(shares) - min(shares) <= 1


BUSY = ((77, GIB),)
EXCLUSIVE = {"layout": "exclusive", "scheduler_rank": 1}


@pytest.mark.parametrize(
    ("ranks", "options", "device", "warning"),
    [
        (one_host(ABC[:2]), {}, "GPU-0000", ""),
        # somebody else computes on the first one
        (one_host((gpu(0, processes=BUSY), gpu(1))), {}, "GPU-0001", ""),
        (one_host((gpu(0, uuid="MIG-a", parent="GPU-0000"),)), {}, "MIG-a", ""),
        (one_host(ABC), {"worker_class": "distributed.Nanny"}, "", ""),
        (one_host((gpu(0, exclusive=True), gpu(1))), {}, "GPU-0001", ""),
        # a GPU without a worker comes first
        (one_host(*((each,) for each in ABC)), EXCLUSIVE, "GPU-0001", ""),
        (one_host((gpu(0, exclusive=True),)), {}, "", "(rank 0 on h1) has no GPU, as one process alone may use each"),
        ([rank(0, 2, host="login"), rank(1, 2, ABC, host="n1")], {}, "", "(rank 0 on login) sees no GPU: graphs that hold GPU"),
    ],
)  # fmt: skip
def test_the_scheduler_sees_a_gpu_of_its_rank(
    ranks: list[Inventory], options: dict[str, Any], device: str, warning: str
) -> None:
    found = plan(ranks, **options)
    assert found.scheduler_device == device
    told = [line for line in map(str, found.warnings) if line.startswith("the scheduler ")]
    assert [warning in line for line in told] == [True] * bool(warning)


# -- the workers of a host


def test_names_with_a_prefix() -> None:
    assert names(plan(hypothetical_job(1, 1, 1), name="job", cpu_workers=1)) == ["job-0-0", "job-0-cpu-0"]
    assert names(plan(hypothetical_job(1, 2, 0), name="job")) == ["job-0", "job-1"]


def test_cpu_workers_come_once_on_every_host() -> None:
    found = plan(hypothetical_job(2, 2, 2, cpus_per_node=8), cpu_workers=2)
    assert names(found) == ["0-0", "0-cpu-0", "0-cpu-1", "1-1", "2-0", "2-cpu-0", "2-cpu-1", "3-1"]
    extra = found.workers[1]
    assert (extra.kind, extra.nthreads, extra.cpus, extra.memory_limit) == ("cpu", 4, (*range(8),), 64 * GIB)
    assert extra.resources == {"CPU": 4.0}
    # in a job without GPUs they share the cores with the others
    found = plan(hypothetical_job(1, 2, 0, cpus_per_node=8), cpu_workers=2)
    assert [(w.name, w.nthreads) for w in found.workers] == [(0, 2), ("0-cpu-0", 2), ("0-cpu-1", 2), (1, 2)]


ONE, OTHER = {"numa": 1, "nics": "mlx5_0:1"}, {"numa": 0, "nics": "mlx5_1:1,mlx5_2:1"}


@pytest.mark.parametrize(
    ("gpus", "options", "places"),
    [
        ((ONE, OTHER, {}), {"cpu_workers": 1}, [(1, ONE["nics"]), (0, OTHER["nics"]), (None, ""), (None, "")]),
        # of several GPUs all devices, and a node that they share
        ((ONE, OTHER), {"gpus_per_worker": 2}, [(None, "mlx5_0:1,mlx5_1:1,mlx5_2:1")]),
        ((ONE, ONE), {"gpus_per_worker": 2}, [(1, "mlx5_0:1")]),
        # any device would be left out otherwise
        ((ONE, {"numa": 1}), {"gpus_per_worker": 2}, [(1, "")]),
    ],
)  # fmt: skip
def test_memory_and_network_devices_near_the_gpus(
    gpus: tuple[dict[str, Any], ...], options: dict[str, int], places: list[Any]
) -> None:
    found = plan(one_host(tuple(gpu(number, **each) for number, each in enumerate(gpus))), **options)
    assert [(worker.numa, worker.nics) for worker in found.workers] == places


ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("masks", "quota", "threads"),
    [
        ([], None, []), ([ALL, ALL, ALL], None, [2, 2, 2]), ([(0, 1), (2, 3, 4, 5)], None, [2, 4]),
        ([()], 4.0, [1]),  # nobody knows its cores
        # a quota of a container: together no more threads, but one each
        ([ALL], 2.5, [2]), ([ALL], 0.5, [1]), ([ALL], 8.0, [8]), ([ALL], 64.0, [8]), ([ALL, ALL], 3.0, [1, 1]),
        ([(0, 1), (2, 3, 4, 5, 6, 7)], 4.0, [1, 3]), ([ALL] * 16, 4.0, [1] * 16),
    ],
)  # fmt: skip
def test_threads(masks: list[tuple[int, ...]], quota: float | None, threads: list[int]) -> None:
    assert share_cores(masks, quota) == threads


def test_a_cpu_quota_limits_the_threads_of_cpu_workers() -> None:
    """The smallest that a rank of the host is told, as of memory; other hosts and the cores stay."""
    ranks = list(hypothetical_job(2, 2, 0, cpus_per_node=16))
    ranks[:2] = [replace(one, cpu_quota=quota) for one, quota in zip(ranks, (6.0, 4.0), strict=False)]
    found = plan(ranks)
    assert [worker.nthreads for worker in found.workers] == [2, 2, 8, 8]
    assert {worker.cpus for worker in found.workers} == {tuple(range(16))}
    assert {worker.nthreads for worker in plan(ranks, nthreads=5).workers} == {5}


@pytest.mark.parametrize(
    ("limit", "each"),
    [
        ("auto", 128 * GIB), ("4000000000", 4 * 10**9), (0.25, 64 * GIB), (1, 256 * GIB), ("200 GiB", 200 * GIB), (0, 0),
        (None, 0),
    ],
)  # fmt: skip
def test_memory_limits(limit: Any, each: int) -> None:
    found = plan(hypothetical_job(1, 2, 0), memory_limit=limit)
    assert [w.memory_limit for w in found.workers] == [each, each]
    told = [w for w in map(str, found.warnings) if "on h1, 2 workers" in w and "256.00 GiB" in w]
    assert len(told) == (2 * each > 256 * GIB)


def test_limits_that_are_more_than_the_host_has_are_told_once_for_hosts_alike() -> None:
    fine = [
        ("h1", 2 * GIB, 4, 8 * GIB),  # just what there is
        ("h2", 8 * GIB, 4, 0),  # unknown memory
        ("h3", 0, 4, 8 * GIB),  # no limit
    ]
    more = [("h4", 2 * GIB + 1, 4, 8 * GIB), ("h5", 2 * GIB + 1, 4, 8 * GIB), ("h6", 2, 1, 1)]
    first, second = map(str, excess_warnings([*fine, *more]))
    told = "on h[4-5], 4 workers with a memory limit of 2.00 GiB each may use more than the 8.00 GiB"
    assert first.startswith(told)
    assert second.startswith("on h6, 1 workers with a memory limit of 2 B")


# -- the GPUs of a host, put together from what its ranks see


def seen_gpu(uuid: str = "GPU-a", index: int = 0, **more: object) -> Gpu:
    return Gpu(uuid=uuid, index=index, name="A100", memory=100, **more)  # type: ignore[arg-type]


def test_a_gpu_that_several_ranks_see_counts_once_in_pci_order() -> None:
    """Without PCI the index gives the order."""
    one, two = seen_gpu("GPU-b", 0, pci="0:2"), seen_gpu("GPU-a", 0, pci="0:1")
    assert gpus_of_host([(10, [one]), (20, [two, one])]) == [two, one]
    found = [seen_gpu("MIG-a", 1, slice=1), seen_gpu("MIG-b", 1, slice=0), seen_gpu("GPU-c", 0)]
    assert [each.uuid for each in gpus_of_host([(1, found)])] == ["GPU-c", "MIG-b", "MIG-a"]


@pytest.mark.parametrize(
    ("free", "least"), [((5, 3), 3), ((-1, 3), 3), ((5, -1), 5), ((-1, -1), -1), ((0, 3), 0)]
)
def test_the_least_free_memory_that_a_rank_saw_counts(free: tuple[int, int], least: int) -> None:
    (found,) = gpus_of_host([(1, [seen_gpu(free=free[0])]), (2, [seen_gpu(free=free[1])])])
    assert found.free == least


@pytest.mark.parametrize(
    ("views", "processes"),
    [
        ([((7, 3),), ((7, 5),)], ((7, 5),)),
        # a size that one rank was told
        ([((7, None),), ((7, 3),)], ((7, 3),)),
        ([((7, 3),), ((7, None),)], ((7, 3),)),
        ([((7, None),), ()], ((7, None),)),
        # the ranks themselves
        ([((2, 3), (8, 1)), ((1, 3),)], ((8, 1),)),
    ],
)
def test_the_other_processes_as_the_worst_that_a_rank_saw(
    views: list[tuple[tuple[int, int | None], ...]], processes: tuple[tuple[int, int | None], ...]
) -> None:
    (found,) = gpus_of_host((pid, [seen_gpu(processes=seen)]) for pid, seen in enumerate(views, 1))
    assert found.processes == processes
