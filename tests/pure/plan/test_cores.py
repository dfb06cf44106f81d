"""The cores of a host, shared between its workers."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.plan.gpu_assignment import intersection, near_cores, share_cores
from support.mocks.inputs import gpu

ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("masks", "quota", "threads"),
    [
        ([], None, []),
        ([], 4.0, []),
        ([ALL], None, [8]),
        ([ALL, ALL, ALL], None, [2, 2, 2]),
        ([(0, 1), (2, 3, 4, 5)], None, [2, 4]),
        ([(0, 1)] * 4, None, [1] * 4),
        ([()], 4.0, [1]),  # nobody knows its cores
        # a quota of a container: together no more threads, but one each
        ([ALL], 2.5, [2]),
        ([ALL], 0.5, [1]),
        ([ALL], 8.0, [8]),
        ([ALL], 64.0, [8]),
        ([ALL, ALL], 6.0, [3, 3]),
        ([ALL, ALL], 3.0, [1, 1]),
        ([(0, 1), (2, 3, 4, 5, 6, 7)], 4.0, [1, 3]),
        ([ALL] * 16, 4.0, [1] * 16),
    ],
)
def test_threads(masks: list[tuple[int, ...]], quota: float | None, threads: list[int]) -> None:
    assert share_cores(masks, quota) == threads


def test_cores_near_gpus() -> None:
    assert near_cores([]) == frozenset()
    near = near_cores([gpu(0, cpus=(0, 1)), gpu(1, cpus=(1, 2)), gpu(2)])
    assert near == {0, 1, 2}
    assert intersection(near, (3, 2, 0)) == (0, 2)
    assert intersection(near, (4,)) == ()
