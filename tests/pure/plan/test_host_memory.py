from __future__ import annotations

import pytest

from dask_gpu_mpi.plan.host_memory import excess_warnings, worker_limit

GIB = 1024**3


@pytest.mark.parametrize(
    ("limit", "memory", "workers", "each"),
    [
        (None, 10, 3, 3),
        (None, 10, 0, 0),
        (None, 0, 3, 0),
        (0.25, 10, 3, 2),
        (1.0, 10, 3, 10),
        (0, 10, 3, 0),
        (12, 10, 3, 12),
    ],
)
def test_the_limit_of_each_worker(limit: int | float | None, memory: int, workers: int, each: int) -> None:
    assert worker_limit(limit, memory, workers) == each


def test_limits_that_are_more_than_the_host_has_are_told_once_for_hosts_alike() -> None:
    fine = [
        ("h1", 2 * GIB, 4, 8 * GIB),  # just what there is
        ("h2", 8 * GIB, 4, 0),  # unknown memory
        ("h3", 0, 4, 8 * GIB),  # no limit
    ]
    assert excess_warnings(fine) == []
    more = [(host, 2 * GIB + 1, 4, 8 * GIB) for host in ("h4", "h5")]
    first, second = excess_warnings([*fine, *more, ("h6", 9 * GIB, 1, 8 * GIB)])
    assert first.startswith(
        "on h[4-5], 4 workers with a memory limit of 2.00 GiB each may use more than the 8.00 GiB"
    )
    assert second.startswith("on h6, 1 workers with a memory limit of 9.00 GiB")
    assert len(excess_warnings([("h7", 2, 1, 1)])) == 1
