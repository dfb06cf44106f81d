import sys
from pathlib import Path

import numpy as np
from distributed import Client, wait

from support.jobs.scripts.tell import tell

folder, size = Path(sys.argv[1]), 40_000_000


def make(seed):
    return np.random.default_rng(seed).integers(0, 255, size, "u1")


def sums(*arrays):
    return [int(array.sum()) for array in arrays]


with Client() as client:
    *_, here, there = sorted(client.scheduler_info(n_workers=-1)["workers"])
    arrays = [client.submit(make, seed, workers=[there], allow_other_workers=True) for seed in range(8)]
    wait(arrays)
    found = [client.submit(sums, *arrays[k : k + 2], workers=[here]) for k in range(0, 8, 2)]
    (folder / "crossing").touch()
    sent = [int(make(seed).sum()) for seed in range(8)]
    tell(right=[each for pair in client.gather(found) for each in pair] == sent)
    (folder / "crossed").touch()
