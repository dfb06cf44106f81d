"""Tasks that fork, and workers above their memory limit: what SIGTERM does there."""

from __future__ import annotations

import pytest

from support.jobs.mpi import Mpi

pytestmark = pytest.mark.one_mpi

POOLS = """
import multiprocessing, time

def pools(count):
    context = multiprocessing.get_context("METHOD")
    for _ in range(count):
        with context.Pool(2) as pool:  # whose end is a SIGTERM
            pool.map(abs, range(4))
    global left
    left = context.Pool(1)
    left.apply_async(time.sleep, (600,))
    stubborn = context.Process(target=time.sleep, args=(600,))
    stubborn.start()
    stubborn.terminate()  # before it runs, perhaps
    stubborn.join(20)
    return count, stubborn.exitcode

from dask_gpu_mpi import initialize
initialize(worker_class="CLASS", nthreads=1)
from distributed import Client
with Client() as client:
    print(client.gather([client.submit(pools, 5, workers=[name]) for name in range(2)]))
"""


@pytest.mark.parametrize(
    ("worker_class", "method"),
    [("distributed.Nanny", "fork"), ("distributed.Worker", "fork"), ("distributed.Worker", "forkserver")],
)
def test_pools(mpirun: Mpi, worker_class: str, method: str) -> None:
    """They end, and what a task has left running ends with its worker."""
    env = {"DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    done = mpirun.run(POOLS.replace("CLASS", worker_class).replace("METHOD", method), 2, env=env).check()
    assert done.stdout == "[(5, -15), (5, -15)]\n"


def test_the_memory_limit_ends_a_worker_at_once(mpirun: Mpi) -> None:
    program = """
        import os, time
        from dask_gpu_mpi import initialize
        initialize(memory_limit="600 MiB")
        from distributed import Client, KilledWorker

        def fill():
            block = bytearray(os.urandom(1 << 20) * 700)
            time.sleep(60)

        with Client() as client:
            try:
                client.submit(fill).result()
            except KilledWorker:
                print("killed")
    """
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    done = mpirun.run(program, 1, env=env).check()
    assert done.stdout == "killed\n"
    assert done.stderr.count("memory budget. Restarting") == 1
    assert "slow to accept" not in done.stderr
