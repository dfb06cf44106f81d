"""After dask-mpi: the import is all that changes. Every rank works; with GPUs, a worker on each.

Run it with `mpirun -np 2 python examples/migration/after_dask_mpi.py`.
"""

import dask.array as da
from distributed import Client

from dask_gpu_mpi import initialize

initialize()

with Client() as client:
    x = da.arange(1_000_000, chunks=100_000)
    total = int((x**2).sum().compute())

if total != 333_332_833_333_500_000:
    raise SystemExit(f"WRONG: {total}")
print(f"right: the sum of squares is {total}")
