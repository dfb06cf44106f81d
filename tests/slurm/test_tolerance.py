"""Jobs that continue without a rank. The last module: jobs after these have waited for a node for a minute."""

from __future__ import annotations

import os
import signal

import pytest

from support.bed.slurm import RUNS, TWO, Slurm
from support.jobs.clusters import CLIENT
from support.mocks.gpus import NVML


@pytest.mark.both_mpis
@pytest.mark.parametrize("how", ["rank", "node"])
def test_lost_ranks(slurm: Slurm, how: str) -> None:
    """Below srun; the exit code is the script's, and not srun's 137."""
    script = """
from support.jobs.scripts.client import client
futures = client.map(lambda x: (time.sleep(0.1), x)[1], range(200))
print("the script runs", flush=True)
assert sum(client.gather(futures)) == sum(range(200))
while len(client.scheduler_info()["workers"]) > 1 or not os.path.exists("go"):
    time.sleep(0.1)
sys.exit(7)
"""
    job = slurm.run(script, *TWO, "--no-kill", env={"DASK_GPU_MPI__TOLERATE_LOST_RANKS": "1"}, at=RUNS)
    try:
        if how == "rank":
            os.kill(job.ranks()[1], signal.SIGKILL)
        else:
            slurm.ask("scontrol", "update", "nodename=h2", "state=down", "reason=test")
        job.wait_for(
            "rank 1 on h2 lost: .*; it had 1 worker and 1 GPU. Continuing with 1 worker; 0 more ranks may be lost"
        )
        (job.directory / "go").touch()
        job.wait(allowed=".*").check("FAILED", 7)
    finally:
        if how == "node":
            slurm.ask("scontrol", "update", "nodename=h2", "state=idle")


@pytest.mark.both_mpis
def test_rank_that_has_not_responded_at_the_start(slurm: Slurm) -> None:
    """The job starts without it."""
    hangs = """
import os
if os.uname().nodename == "h2":
    import time
    from dask_gpu_mpi.machine import scratch
    scratch.exposed_folder = lambda *given: time.sleep(60)
"""
    script = CLIENT + "assert client.submit(sum, [1, 2]).result() == 3\nsys.exit(7)\n"
    env = {"DASK_GPU_MPI__TOLERATE_LOST_RANKS": "1", "DASK_GPU_MPI__STARTUP_TIMEOUT": "15"}
    env["PYTHONPATH"] = os.pathsep.join([".", str(NVML), os.environ.get("PYTHONPATH", "")])
    job = slurm.run(script, *TWO, "--no-kill", files={"sitecustomize.py": hangs}, env=env)
    job.wait_for(r"rank 1 of 2 on h2 has not responded within 15 s \(startup_timeout\); starting without it")
    job.wait(allowed=".*").check("FAILED", 7)
