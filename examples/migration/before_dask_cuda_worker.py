"""Before: the client of a cluster that before_dask_cuda_worker.sh starts."""

import sys

import dask.array as da
from distributed import Client

with Client(scheduler_file=sys.argv[1]) as client:
    client.wait_for_workers(1)
    x = da.arange(1_000_000, chunks=100_000)
    total = int((x**2).sum().compute())

if total != 333_332_833_333_500_000:
    raise SystemExit(f"WRONG: {total}")
print(f"right: the sum of squares is {total}")
