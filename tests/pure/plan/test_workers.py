"""Names, cores, threads and memory of workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dask_gpu_mpi.machine import inventory
from dask_gpu_mpi.plan.workers import excess_warnings
from support.mocks.inputs import GIB, gpu, names, plan, rank

#: Nodes of the size that the expectations below are for.
hypothetical_job = partial(inventory.hypothetical_job, memory_per_node=256 * GIB)


def test_prefix() -> None:
    assert names(plan(hypothetical_job(1, 1, 1), name="job", cpu_workers=1)) == ["job-0-0", "job-0-cpu-0"]
    assert names(plan(hypothetical_job(1, 2, 0), name="job")) == ["job-0", "job-1"]


def test_cpu_workers_come_once_on_every_host() -> None:
    found = plan(hypothetical_job(2, 2, 2, cpus_per_node=8), cpu_workers=2)
    assert names(found) == ["0-0", "0-cpu-0", "0-cpu-1", "1-1", "2-0", "2-cpu-0", "2-cpu-1", "3-1"]
    extra = found.workers[1]
    assert (extra.kind, extra.nthreads, extra.cpus, extra.memory_limit) == (
        "cpu",
        4,
        tuple(range(8)),
        64 * GIB,
    )
    assert extra.resources == {"CPU": 4.0}


def test_cpu_workers_in_a_job_without_gpus_share_the_cores() -> None:
    found = plan(hypothetical_job(1, 2, 0, cpus_per_node=8), cpu_workers=2)
    assert [(w.name, w.nthreads) for w in found.workers] == [(0, 2), ("0-cpu-0", 2), ("0-cpu-1", 2), (1, 2)]


def test_memory_and_network_devices_near_the_gpus() -> None:
    def places(*gpus: Any, **options: Any) -> list[Any]:
        found = plan([rank(0, 1, tuple(gpu(number, **each) for number, each in enumerate(gpus)))], **options)
        return [(worker.numa, worker.nics) for worker in found.workers]

    one, other = {"numa": 1, "nics": "mlx5_0:1"}, {"numa": 0, "nics": "mlx5_1:1,mlx5_2:1"}
    assert places(one, other, {}, cpu_workers=1) == [
        (1, "mlx5_0:1"),
        (0, other["nics"]),
        (None, ""),
        (None, ""),
    ]
    # of several GPUs all devices, and a node that they share
    assert places(one, other, gpus_per_worker=2) == [(None, "mlx5_0:1,mlx5_1:1,mlx5_2:1")]
    assert places(one, one, gpus_per_worker=2) == [(1, "mlx5_0:1")]
    # any device would be left out otherwise
    assert places(one, {"numa": 1}, gpus_per_worker=2) == [(1, "")]


def test_a_cpu_quota_limits_the_threads_of_cpu_workers() -> None:
    """The smallest that a rank of the host is told, as of memory; other hosts and the cores stay."""
    ranks = list(hypothetical_job(2, 2, 0, cpus_per_node=16))
    ranks[0] = replace(ranks[0], cpu_quota=6.0)
    ranks[1] = replace(ranks[1], cpu_quota=4.0)
    found = plan(ranks)
    assert [worker.nthreads for worker in found.workers] == [2, 2, 8, 8]
    assert {worker.cpus for worker in found.workers} == {tuple(range(16))}
    assert {worker.nthreads for worker in plan(ranks, nthreads=5).workers} == {5}


@pytest.mark.parametrize(
    ("limit", "each", "warned"),
    [
        ("auto", 128 * GIB, False),
        ("4000000000", 4 * 10**9, False),
        (0.25, 64 * GIB, False),
        (1, 256 * GIB, True),
        ("200 GiB", 200 * GIB, True),
        (0, 0, False),
        (None, 0, False),
    ],
)
def test_memory_limits(limit: Any, each: int, warned: bool) -> None:
    found = plan(hypothetical_job(1, 2, 0), memory_limit=limit)
    assert [w.memory_limit for w in found.workers] == [each, each]
    assert any("on h1, 2 workers" in w and "256.00 GiB" in w for w in map(str, found.warnings)) == warned


def test_only_workers_without_a_core_near_their_gpus_are_told() -> None:
    ranks = [rank(0, 2, (gpu(0, cpus=(0,)),), cpus=(0, 1)), rank(1, 2, (gpu(1, cpus=(5,)),), cpus=(0, 1))]
    (warning,) = map(str, plan(ranks).warnings)
    assert "get the ranks' cores: 1-1 on h1 (GPU 1: 5). Fix" in warning
    assert plan([replace(ranks[0], world_size=1)]).warnings == ()


def test_limits_that_are_more_than_the_host_has_are_told_once_for_hosts_alike() -> None:
    fine = [
        ("h1", 2 * GIB, 4, 8 * GIB),  # just what there is
        ("h2", 8 * GIB, 4, 0),  # unknown memory
        ("h3", 0, 4, 8 * GIB),  # no limit
    ]
    assert excess_warnings(fine) == []
    more = [(host, 2 * GIB + 1, 4, 8 * GIB) for host in ("h4", "h5")]
    first, second = map(str, excess_warnings([*fine, *more, ("h6", 9 * GIB, 1, 8 * GIB)]))
    assert first.startswith(
        "on h[4-5], 4 workers with a memory limit of 2.00 GiB each may use more than the 8.00 GiB"
    )
    assert second.startswith("on h6, 1 workers with a memory limit of 9.00 GiB")
    assert len(excess_warnings([("h7", 2, 1, 1)])) == 1
