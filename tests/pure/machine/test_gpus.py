"""The GPUs of a host, put together from what its ranks see."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host


def gpu(uuid: str = "GPU-a", index: int = 0, **more: object) -> Gpu:
    return Gpu(uuid=uuid, index=index, name="A100", memory=100, **more)  # type: ignore[arg-type]


def test_each_once_in_pci_order() -> None:
    one, two = gpu("GPU-b", 0, pci="0:2"), gpu("GPU-a", 0, pci="0:1")
    assert gpus_of_host([(10, [one]), (20, [two, one])]) == [two, one]


def test_without_pci_the_index_orders() -> None:
    found = [gpu("MIG-a", 1, slice=1), gpu("MIG-b", 1, slice=0), gpu("GPU-c", 0)]
    assert [each.uuid for each in gpus_of_host([(1, found)])] == ["GPU-c", "MIG-b", "MIG-a"]


@pytest.mark.parametrize(
    ("free", "least"), [((5, 3), 3), ((-1, 3), 3), ((5, -1), 5), ((-1, -1), -1), ((0, 3), 0)]
)
def test_the_least_free_memory_that_a_rank_saw_counts(free: tuple[int, int], least: int) -> None:
    (found,) = gpus_of_host([(1, [gpu(free=free[0])]), (2, [gpu(free=free[1])])])
    assert found.free == least


@pytest.mark.parametrize(
    ("views", "processes"),
    [
        ([((7, 3),), ((7, 5),)], ((7, 5),)),
        ([((7, 5),), ((7, 3),)], ((7, 5),)),
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
    (found,) = gpus_of_host((pid, [gpu(processes=seen)]) for pid, seen in enumerate(views, 1))
    assert found.processes == processes


def test_a_whole_gpu_of_which_little_is_known() -> None:
    assert (gpu().slice, gpu().free) == (-1, -1)


def test_memory_of_processes() -> None:
    assert gpu().busy == 0
    assert gpu(processes=((7, 3), (8, 4))).busy == 7
    assert gpu(processes=((7, 3), (8, None))).busy is None
