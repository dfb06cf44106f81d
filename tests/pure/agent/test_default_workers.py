"""Tasks that ask for nothing, on a cluster in this process whose workers have the resources of GPU and CPU workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, get_worker

from dask_gpu_mpi.agent.scheduler import GpuByDefault

#: Seconds for one test's cluster.
LIMIT = 60.0


class Cluster:
    """A scheduler with the plugin, its client, and what adds workers."""

    def __init__(self, scheduler: Any, client: Any, stack: contextlib.AsyncExitStack) -> None:
        self.scheduler, self.client, self.stack = scheduler, client, stack

    async def add(self, name: str) -> Any:
        """A worker; its name begins with gpu or cpu."""
        resource = name[:3].upper()
        worker = Worker(
            self.scheduler.address, name=name, nthreads=1, resources={resource: 1}, dashboard=False
        )
        return await self.stack.enter_async_context(worker)


@contextlib.asynccontextmanager
async def cluster(*names: str) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")
        )
        scheduler.add_plugin(GpuByDefault())
        client = await stack.enter_async_context(
            Client(scheduler.address, asynchronous=True, set_as_default=False)
        )
        made = Cluster(scheduler, client, stack)
        for name in names:
            await made.add(name)
        yield made


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT):
            await test()

    # workers in one process warn that they share it
    with dask.config.set({"distributed.worker.memory.pause": False, "distributed.admin.tick.limit": "60s"}):
        asyncio.run(limited())


def where(*_: Any) -> str:
    return str(get_worker().name)


async def names_of(cluster: Cluster, count: int = 12, **asks: Any) -> set[str]:
    return set(await cluster.client.gather(cluster.client.map(where, range(count), pure=False, **asks)))


def test_tasks_go_to_gpu_workers_unless_they_ask_for_something() -> None:
    async def test() -> None:
        async with cluster("gpu-0", "gpu-1", "cpu-0") as made:
            assert await names_of(made) == {"gpu-0", "gpu-1"}
            assert await names_of(made, resources={"CPU": 1}) == {"cpu-0"}
            assert await names_of(made, resources={"GPU": 1}) <= {"gpu-0", "gpu-1"}
            assert await names_of(made, workers=["cpu-0"]) == {"cpu-0"}
            assert await names_of(made, workers=["gpu-1"]) == {"gpu-1"}
            everywhere = await made.client.run(lambda dask_worker: str(dask_worker.name))
            assert sorted(everywhere.values()) == ["cpu-0", "gpu-0", "gpu-1"]
            await made.client.retire_workers(names=["gpu-0"])
            assert await names_of(made) == {"gpu-1"}

    run(test)


def test_without_gpu_workers_tasks_run_anywhere() -> None:
    async def test() -> None:
        async with cluster("cpu-0", "cpu-1") as made:
            assert await names_of(made) == {"cpu-0", "cpu-1"}
            await made.add("gpu-0")
            assert await names_of(made) == {"gpu-0"}

    run(test)


def test_tasks_wait_for_a_gpu_worker_that_comes_back() -> None:
    async def test() -> None:
        async with cluster("gpu-0", "cpu-0") as made:
            (gpu,) = (worker for worker in made.scheduler.workers.values() if worker.name == "gpu-0")
            await made.scheduler.remove_worker(gpu.address, stimulus_id="test", close=True)
            waiting = made.client.map(where, range(4), pure=False)
            while len(made.scheduler.unrunnable) < 4:
                await asyncio.sleep(0.01)
            await made.add("gpu-1")
            assert set(await made.client.gather(waiting)) == {"gpu-1"}
            assert await names_of(made) == {"gpu-1"}
            # the address of the one that has gone is remembered no longer
            plugins = made.scheduler.plugins.values()
            assert [len(each.addresses) for each in plugins if isinstance(each, GpuByDefault)] == [1]

    run(test)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_shuffle_by_p2p(gpus: int) -> None:
    """Which sends its output to workers that it chooses itself."""

    async def test() -> None:
        async with cluster(*(f"gpu-{number}" for number in range(gpus)), "cpu-0") as made:
            x = da.ones((20, 20), chunks=(4, 20)).rechunk((20, 4), method="p2p")
            moved = x.map_blocks(lambda block: np.full(block.shape, where() == "cpu-0"), dtype=bool)
            assert not (await made.client.compute(moved)).any()

    run(test)
