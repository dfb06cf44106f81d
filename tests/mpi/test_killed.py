"""Whatever is killed, nothing of the job stays: no process, and no scratch where there is somebody left to remove it."""

from __future__ import annotations

import os
import signal

import pytest

from support.jobs.clusters import TELL, gone, ranks_of, scratch_of
from support.jobs.mpi import Mpi

SCRIPT = (
    TELL
    + """
import time
from dask_gpu_mpi import initialize
from distributed import Client
initialize()
client = Client()
busy = client.map(time.sleep, [600] * 4, pure=False)
tell(up=True)
time.sleep(600)
"""
)


@pytest.mark.quick(victim="other rank", worker_class="auto")
@pytest.mark.parametrize(
    ("victim", "worker_class"),
    [
        *[(victim, "auto") for victim in ("launcher", "client rank", "other rank")],
        # whose agents die at once with their ranks
        pytest.param("other rank", "distributed.Worker", marks=pytest.mark.one_mpi),
    ],
)
def test_sigkill(mpirun: Mpi, victim: str, worker_class: str) -> None:
    job = mpirun.start(SCRIPT, 2, env={"DASK_GPU_MPI__WORKER_CLASS": worker_class})
    job.wait_for("FACTS")
    assert len(scratch_of(job)) == 2
    ranks = ranks_of(job)
    assert list(ranks) == [0, 1]
    if victim == "launcher":
        job.launcher.kill()
    else:
        os.kill(ranks[0 if victim == "client rank" else 1], signal.SIGKILL)
    assert gone(job, 10), job.processes()
    assert job.wait(10).rc != 0
    assert scratch_of(job) == []
