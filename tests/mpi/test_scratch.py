"""What workers have spilled, at the end of a job."""

from __future__ import annotations

import os
from pathlib import Path

from support.jobs.clusters import COMMAND, scratch_of
from support.jobs.mpi import Mpi

#: A slow file system: every removal of what `SPILL` writes takes its time.
SLOW = """
import os, time

def slowly(unlink):
    def wrapped(path, *args, **kwargs):
        if "spilled-" in str(path):
            time.sleep(0.05)
        return unlink(path, *args, **kwargs)
    return wrapped

os.unlink = os.remove = slowly(os.unlink)
"""
#: Removing them takes 20 s for each worker.
SPILL = """
import os
from distributed import Client

def spill(dask_worker):
    for i in range(400):
        open(os.path.join(dask_worker.local_directory, f"spilled-{i}"), "w").close()

client = Client()
client.run(spill)
"""


def test_a_removal_that_takes_too_long_is_cut_short(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    script = tmp_path / "script.py"
    script.write_text(SPILL)
    program = [*COMMAND, "--shutdown-timeout", "1", str(script)]
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    # whose directories are removed by a process of the worker and by the nanny, and by the agent itself
    classes = [{"DASK_GPU_MPI__WORKER_CLASS": f"distributed.{name}"} for name in ("Nanny", "Worker")]
    job = mpirun.start(program, 2, env=env, per_rank_env=classes)
    done = job.wait(60).check()
    assert "did not answer" not in done.output
    assert "Traceback" not in done.output
    for rank in (0, 1):
        assert done.stderr.count(f"warning: rank {rank} on ") == 1, done.stderr
    assert done.stderr.count("could not remove all of ") == len(scratch_of(job)) == 2
