import os

from distributed import Client, wait

from support.jobs.scripts.tell import tell


async def ports(dask_worker):
    import sys

    import psutil

    from dask_gpu_mpi.network.ucx_endpoint import Ucx

    await Ucx.begin()
    own = {listener.bound_address[1] for listener in dask_worker.listeners}
    found = [
        each.laddr for each in psutil.Process().net_connections("inet") if each.status in ("LISTEN", "NONE")
    ]
    return {
        "pid": os.getpid(),
        "ucx": "libucxx" in sys.modules or "ucxx" in sys.modules,
        "own": len(own),
        "others": [f"{place.ip}:{place.port}" for place in found if place.port not in own],
    }


def array(i):
    import cupy

    return cupy.full(1_000_000, i, dtype="i8")


def exchange(client):
    # each worker reads an array of each other one
    names = [worker["name"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()]
    made = [client.submit(array, i, workers=[name], pure=False) for i, name in enumerate(names)]
    wait(made)
    sums = [
        client.submit(lambda *all: int(sum(each[0] for each in all)), *made, workers=[name], pure=False)
        for name in names
    ]
    assert client.gather(sums) == [sum(range(len(names)))] * len(names)


client = Client()
exchange(client)
before = [*client.run(ports).values()]
client.restart(timeout=60)
exchange(client)
tell(before=before, after=[*client.run(ports).values()])
