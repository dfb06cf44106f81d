import os
import signal

import numpy as np
from distributed import Client, wait

from support.jobs.scripts.tell import tell


def make(seed, size):
    return np.random.default_rng(seed).integers(0, 255, size, "u1")


def sums(*arrays):
    return [int(array.sum()) for array in arrays]


def streams(dask_worker):
    import gc

    from dask_gpu_mpi.network.streams import Streams

    found = [len(each._streams) for each in gc.get_objects() if isinstance(each, Streams)]
    return max(found, default=0)


with Client() as client:
    one, two = sorted(client.scheduler_info(n_workers=-1)["workers"])
    size, there = 30_000_000, []
    for here, other in ((one, two), (two, one)):
        arrays = [client.submit(make, seed, size, workers=[here]) for seed in range(4)]
        wait(arrays)
        found = client.submit(sums, *arrays, workers=[other]).result()
        there += [a == int(make(seed, size).sum()) for seed, a in enumerate(found)]
    tell(right=there, bytes=4 * 2 * size, streams=[*client.run(streams).values()])

    # a worker dies while another one fetches its data, which are computed again
    arrays = [
        client.submit(make, seed, 3 * size, workers=[two], allow_other_workers=True) for seed in range(6)
    ]
    wait(arrays)
    result = client.submit(sums, *arrays, workers=[one])
    os.kill(
        client.run(os.getpid, workers=[two])[two], signal.SIGKILL
    )  # the hosts of the test bed share process ids
    tell(after_death=result.result(timeout=60), expected=sums(*(make(seed, 3 * size) for seed in range(6))))
