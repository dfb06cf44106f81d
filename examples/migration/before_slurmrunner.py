"""Before: dask-jobqueue's SLURMRunner. One task schedules, one is this script, the others work.

Run it with `srun -n 3 python examples/migration/before_slurmrunner.py`.
"""

import dask.array as da
from dask_jobqueue.slurm import SLURMRunner
from distributed import Client

with SLURMRunner() as runner, Client(runner) as client:
    client.wait_for_workers(runner.n_workers)
    x = da.arange(1_000_000, chunks=100_000)
    total = int((x**2).sum().compute())

if total != 333_332_833_333_500_000:
    raise SystemExit(f"WRONG: {total}")
print(f"right: the sum of squares is {total}")
