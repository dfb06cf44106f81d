"""Tasks that fork, and workers above their memory limit: what SIGTERM does there."""

from __future__ import annotations

import pytest

from support.jobs.mpi import Mpi
from support.jobs.scripts import script

POOLS = script("mpi/scripts/pools.py")


@pytest.mark.parametrize(
    ("worker_class", "method"), [("distributed.Nanny", "fork"), ("distributed.Worker", "forkserver")]
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
