import sys
import time

import dask.array as da
import numpy as np
from distributed import Client, wait

from support.jobs.scripts.tell import looks, tell


def over_ucx(dask_worker):
    import gc

    from dask_gpu_mpi.network.worker_comm import WorkerComm

    return sum(isinstance(each, WorkerComm) and each._uses_ucx for each in gc.get_objects())


def processes_with_ucx(client):
    def has():
        return "ucxx" in sys.modules or "libucxx" in sys.modules

    return {
        "workers": sorted(client.run(has).values()),
        "nannies": sorted(client.run(has, nanny=True).values()),
        "scheduler": client.run_on_scheduler(has),
        "client": "ucxx" in sys.modules or "libucxx" in sys.modules,
    }


def listening(dask_worker):
    import psutil

    own = {listener.bound_address[1] for listener in dask_worker.listeners}
    found = [
        each.laddr for each in psutil.Process().net_connections("inet") if each.status in ("LISTEN", "NONE")
    ]
    return [f"{place.ip}:{place.port}" for place in found if place.port not in own]


def meet(client):
    """Each worker gets an array of each other one."""
    workers = [*client.run(int)]
    arrays = [client.scatter(np.ones(100_000), workers=[worker], hash=False) for worker in workers]
    sums = [
        client.submit(lambda *parts: sum(map(np.sum, parts)), *arrays, workers=[worker], pure=False)
        for worker in workers
    ]
    assert client.gather(sums) == [len(workers) * 100_000] * len(workers)


def work(client):
    meet(client)
    x = da.random.random((2_000, 2_000), chunks=500).persist()
    wait(x)
    total, twice = (float(value) for value in client.gather(client.compute([x.sum(), (x + x.T).sum()])))
    assert abs(twice - 2 * total) < 1e-6 * total
    return total


def seen(client):
    tell(total=work(client), scheduler=client.scheduler.address, workers=looks(client))
    tell(over_ucx=sorted(client.run(over_ucx).values()), loaded=processes_with_ucx(client))
    tell(listening=sorted(each for found in client.run(listening).values() for each in found))
