import asyncio
import json
import os
import sys

from dask_cuda import CUDAWorker
from distributed import Client, Scheduler
from distributed.diagnostics import nvml


def inside(dask_worker):
    return {
        "name": dask_worker.name,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "data": type(dask_worker.data).__name__,
        "device_limit": dask_worker.data.device_buffer.fast.n,
        "affinity": sorted(os.sched_getaffinity(0)),
        "real_time": nvml.real_time(),
        "one_time": nvml.one_time(),
        "monitor": dask_worker.get_monitor_info(),
        "resources": dask_worker.state.total_resources,
    }


async def main():
    local = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"}
    async with Scheduler(port=0, protocol="tcp", **local) as scheduler:
        options = {"name": "0-1", "memory_limit": 2**29, "local_directory": sys.argv[1], "resources": "GPU=1"}
        worker = CUDAWorker(scheduler.address, **local, **options)
        try:
            await worker
            async with Client(scheduler.address, asynchronous=True) as client:
                told = await client.run(inside)
                four = await client.submit(lambda: 2 + 2, resources={"GPU": 1})
            metrics = [state.metrics for state in scheduler.workers.values()]
        finally:
            await worker.close()
    print(json.dumps({"told": list(told.values()), "four": four, "metrics": metrics}, default=str))


if __name__ == "__main__":
    asyncio.run(main())
