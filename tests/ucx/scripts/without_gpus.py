import os

import dask.array as da
from distributed import Client, wait

from support.jobs.scripts.tell import looks, tell


def nannies(dask_worker):
    return dask_worker.nanny


async def watches_ucx(dask_worker):
    import asyncio

    import ucxx

    return ucxx.core._ctx.worker.epoll_file_descriptor in asyncio.get_running_loop()._selector.get_map()


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(5)


def seen(client):
    from mpi4py import MPI

    x = da.random.random((2_000, 2_000), chunks=500).persist()
    wait(x)
    total, twice = (float(value) for value in client.gather(client.compute([x.sum(), (x + x.T).sum()])))
    tell(
        world=MPI.COMM_WORLD.size,
        scheduler=client.scheduler.address,
        workers=looks(client),
        nannies=[*client.run(nannies).values()],
        agents=[*client.run(os.getpid, nanny=True).values()],
        total=total,
        twice=twice,
    )
