"""After: a plain Dask script. `dask-gpu-mpi launch` (or `mpirun ... dask-gpu-mpi`) runs it as the client of the job's cluster.

Run it with `dask-gpu-mpi launch -n 2 examples/migration/squares.py`.
"""

import dask.array as da
from distributed import Client

with Client() as client:
    x = da.arange(1_000_000, chunks=100_000)
    total = int((x**2).sum().compute())

if total != 333_332_833_333_500_000:
    raise SystemExit(f"WRONG: {total}")
print(f"right: the sum of squares is {total}")
