"""Tasks that ask for nothing, on a cluster in this process whose workers have the resources of GPU and CPU workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, get_worker

from dask_gpu_mpi.agent.scheduler import GpuByDefault


class Cluster:
    """A scheduler with the plugin, its client, and what adds workers."""

    def __init__(self, scheduler: Any, client: Any, stack: contextlib.AsyncExitStack) -> None:
        self.scheduler, self.client, self.stack = scheduler, client, stack

    async def add(self, name: str) -> Any:
        """A worker; its name begins with gpu or cpu."""
        worker = Worker(
            self.scheduler.address, name=name, nthreads=1, resources={name[:3].upper(): 1}, dashboard=False
        )
        return await self.stack.enter_async_context(worker)

    async def names(self, **asks: Any) -> set[str]:
        """Where a dozen tasks have run."""
        return set(await self.client.gather(self.client.map(where, range(12), pure=False, **asks)))


def where(*_: Any) -> str:
    return str(get_worker().name)


@contextlib.asynccontextmanager
async def cluster(*names: str) -> AsyncIterator[Cluster]:
    """A cluster with these workers."""
    # workers in one process warn that they share it
    with dask.config.set({"distributed.worker.memory.pause": False, "distributed.admin.tick.limit": "60s"}):
        async with contextlib.AsyncExitStack() as stack:
            scheduler: Any = Scheduler(
                host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0"
            )
            await stack.enter_async_context(scheduler)
            scheduler.add_plugin(GpuByDefault())
            client: Any = Client(scheduler.address, asynchronous=True, set_as_default=False)
            made = Cluster(scheduler, await stack.enter_async_context(client), stack)
            for name in names:
                await made.add(name)
            yield made


async def test_without_gpu_workers_tasks_run_anywhere() -> None:
    """With them, unless they ask for something: tests/mpi/test_default_workers.py."""
    async with cluster("cpu-0", "cpu-1") as made:
        assert await made.names() == {"cpu-0", "cpu-1"}
        await made.add("gpu-0")
        await made.add("gpu-1")
        assert await made.names() == {"gpu-0", "gpu-1"}
        assert await made.names(workers=["cpu-0"]) == {"cpu-0"}
        await made.client.retire_workers(names=["gpu-0"])
        assert await made.names() == {"gpu-1"}


async def test_tasks_wait_for_a_gpu_worker_that_comes_back() -> None:
    async with cluster("gpu-0", "cpu-0") as made:
        (gpu,) = (worker for worker in made.scheduler.workers.values() if worker.name == "gpu-0")
        await made.scheduler.remove_worker(gpu.address, stimulus_id="test", close=True)
        waiting = made.client.map(where, range(4), pure=False)
        while len(made.scheduler.unrunnable) < 4:
            await asyncio.sleep(0.01)
        await made.add("gpu-1")
        assert set(await made.client.gather(waiting)) == {"gpu-1"}
        # the address of the one that has gone is remembered no longer
        plugins = made.scheduler.plugins.values()
        assert [len(each.addresses) for each in plugins if isinstance(each, GpuByDefault)] == [1]


@pytest.mark.parametrize("gpus", [1, 2])
async def test_a_shuffle_by_p2p(gpus: int) -> None:
    """Which sends its output to workers that it chooses itself."""
    async with cluster(*(f"gpu-{number}" for number in range(gpus)), "cpu-0") as made:
        x = da.ones((20, 20), chunks=(4, 20)).rechunk((20, 4), method="p2p")
        moved = x.map_blocks(lambda block: np.full(block.shape, where() == "cpu-0"), dtype=bool)
        assert not (await made.client.compute(moved)).any()
