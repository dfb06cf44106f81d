from __future__ import annotations

from dataclasses import replace

import dask.config
import pytest
from distributed import comm  # registers distributed's defaults  # noqa: F401
from distributed.scheduler import heartbeat_interval

from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.startup import transport as scaling
from support import ROOT
from support.mocks.inputs import plan


def test_defaults_are_distributeds() -> None:
    with dask.config.set({}):
        assert dask.config.get(scaling.CONNECT) == f"{scaling.DEFAULT_CONNECT:g}s"
        assert dask.config.get(scaling.BACKLOG) == scaling.DEFAULT_BACKLOG


def per_core(*hosts: tuple[int, int], quota: float | None = None) -> float:
    """Of a plan of hosts with so many CPU workers and cores each."""
    ranks = [
        replace(rank, host=f"h{number}", boot_id=f"b{number}", cpu_quota=quota)
        for number, (workers, cores) in enumerate(hosts)
        for rank in hypothetical_job(1, workers, 0, cpus_per_node=cores)
    ]
    numbered = [replace(rank, rank=number, world_size=len(ranks)) for number, rank in enumerate(ranks)]
    return scaling.workers_per_core(plan(numbered))


def test_many_workers_on_few_cores_may_take_longer() -> None:
    # a laptop, and a host with a worker for each core: Dask's defaults
    laptop = per_core((4, 2))
    assert (laptop, scaling.connection_settings(4, laptop)) == (2, {})
    # the host with the most workers for its cores counts
    crowded = per_core((64, 64), (128, 2), (4, 4))
    assert (crowded, scaling.connection_settings(192, crowded)) == (64, {scaling.CONNECT: "256s"})
    assert scaling.start_limit(192, crowded) == 512


def test_cores_of_a_node() -> None:
    # a container's quota, although its affinity mask has all cores of the machine (`machine.cgroups.cpu_quota`)
    assert [per_core((4, 8), quota=quota) for quota in (8.0, 2.0, 0.5)] == [0.5, 2.0, 8.0]
    # those of workers that overlap count once, and unknown ones as one
    one, two = hypothetical_job(1, 2, 0, cpus_per_node=4)
    assert scaling.workers_per_core(plan([replace(one, cpus=(0, 1, 2)), replace(two, cpus=(2, 3))])) == 0.5
    (unknown,) = hypothetical_job(1, 1, 0)
    assert scaling.workers_per_core(plan([replace(unknown, cpus=())], cpu_workers=2)) == 3
    # and a node without a worker does not count
    assert (
        scaling.workers_per_core(plan(hypothetical_job(3, 1, 0, cpus_per_node=2), layout="exclusive")) == 0.5
    )


@pytest.mark.parametrize(
    ("workers", "cores", "connect", "backlog"),
    [
        (512, 7.5, None, None),
        (513, 0.0, None, 2052),
        (600, 0.0, None, 2400),
        (601, 0.0, "30.05s", 2404),
        (1300, 1.0, "65s", 5200),  # distributed#3691
        (1, 7.75, "31s", None),
        (12000, 0.0, "600s", 48000),
        (12001, 0.0, "600s", 48004),
        (16383, 0.0, "600s", 65532),
        (16384, 0.0, "600s", 65535),
        (1, 1000.0, "600s", None),
    ],
)
def test_settings_at_their_bounds(
    workers: int, cores: float, connect: str | None, backlog: int | None
) -> None:
    settings = scaling.connection_settings(workers, cores)
    assert (settings.get(scaling.CONNECT), settings.get(scaling.BACKLOG)) == (connect, backlog)


def test_limits_and_delays() -> None:
    assert (scaling.start_limit(1000, 0.0), scaling.start_limit(10, 2.0)) == (100.0, 16.0)
    assert scaling.start_delay(255, 256) == 0.0
    assert scaling.start_delay(250, 257) == 1.0


def test_the_table_of_the_documentation() -> None:
    """Of our values and of distributed's, `Scheduler.check_worker_ttl` among them."""
    text = (ROOT / "contributing" / "design.md").read_text()
    for workers in (64, 600, 1000, 3000, 8192, 27648):
        ours = scaling.connection_settings(workers, 0.0)
        connect = round(float(ours.get(scaling.CONNECT, "30s").rstrip("s")))
        backlog = ours.get(scaling.BACKLOG, scaling.DEFAULT_BACKLOG)
        beat = heartbeat_interval(workers)
        row = f"{workers:,} | {connect} s | {backlog:,} | {beat:.0f} s | {max(300, 10 * beat):,.0f} s | {3 * workers:,}"
        assert f"| {row} |" in text, row
