"""Before: dask-mpi. One rank schedules, one is this script, the others work.

Run it with `mpirun -np 3 python examples/migration/before_dask_mpi.py`.
"""

import dask.array as da
from dask_mpi import initialize
from distributed import Client

initialize()

with Client() as client:
    x = da.arange(1_000_000, chunks=100_000)
    total = int((x**2).sum().compute())

if total != 333_332_833_333_500_000:
    raise SystemExit(f"WRONG: {total}")
print(f"right: the sum of squares is {total}")
