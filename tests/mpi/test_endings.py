"""Ends that once went wrong: each a script, its exit code, and how long the job may go on after its last line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.jobs.clusters import INITIALIZED, cpu_seconds, facts, ranks_of, scratch_of
from support.jobs.mpi import Mpi


@pytest.mark.both_mpis
def test_what_was_printed_before_an_abort_arrives(mpirun: Mpi) -> None:
    """MPICH's launcher loses one such report in ten without the wait that tests/pure/base/test_frames.py looks at."""
    program = """
        import os, sys, time
        from dask_gpu_mpi.mpi.world import world_of

        world = world_of(dict(os.environ), sys.path)
        while not world.size:
            time.sleep(0.01)
            world.receive()
        if world.rank:
            time.sleep(60)
        print("the report", flush=True)
        print("and why", file=sys.stderr, flush=True)
        world.abort(3)
    """
    for _ in range(6 if mpirun.name == "mpich" else 1):
        done = mpirun.run(program, 2).check(3)
        assert done.stdout == "the report\n"
        assert "and why\n" in done.stderr


# -- what workers have spilled, at the end of a job


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
    # whose directories are removed by a process of the worker and by the nanny, and by the agent itself
    classes = [{"DASK_GPU_MPI__WORKER_CLASS": f"distributed.{name}"} for name in ("Nanny", "Worker")]
    job = mpirun.start(SPILL, 2, command=["--shutdown-timeout", "1"], path=tmp_path, per_rank_env=classes)
    done = job.wait().check()
    assert "did not answer" not in done.output
    assert "Traceback" not in done.output
    for rank in (0, 1):
        assert done.stderr.count(f"warning: rank {rank} on ") == 1, done.stderr
    assert done.stderr.count("could not remove all of ") == len(scratch_of(job)) == 2


# -- ranks that wait leave the cores to others


WAITS = """
from support.jobs.scripts.tell import go_on, look, tell
import time
from distributed import Client
from dask_gpu_mpi import initialize
initialize(worker_class="distributed.Nanny", cpu_workers=1)
with Client() as client:
    look = lambda dask_worker: {name: each.callback_time for name, each in dask_worker.periodic_callbacks.items()}
    tell(nannies=list(client.run(look, nanny=True).values()), workers=list(client.run(look).values()))
tell(up=True)
go_on = os.path.join(os.environ["TMPDIR"], "go-on")
while not os.path.exists(go_on):
    time.sleep(0.5)
"""
SECONDS, SHARE = 4.0, 0.02


def test_idle_ranks_use_no_core(mpirun: Mpi) -> None:
    """And nannies do not measure the event loop that they share."""
    job = mpirun.start(WAITS, 2)
    job.wait_for('"up"')
    told = facts(job)
    assert len(told["nannies"]) == len(told["workers"]) == 3
    for callbacks in told["nannies"]:
        assert min(callbacks["tick"], callbacks["ticks"], callbacks["monitor"]) > 1e9
        assert "memory_monitor" in callbacks
    assert all(callbacks["tick"] == 20 for callbacks in told["workers"]), told["workers"]
    ranks = ranks_of(job)
    assert list(ranks) == [0, 1]
    shares: dict[int, float] = {}
    for _ in range(2):  # a count of CPU time, not of time; but the first look may see the end of the start
        before, start = {rank: cpu_seconds(pid) for rank, pid in ranks.items()}, time.monotonic()
        time.sleep(SECONDS)
        elapsed = time.monotonic() - start
        shares = {rank: (cpu_seconds(pid) - before[rank]) / elapsed for rank, pid in ranks.items()}
        if max(shares.values()) < SHARE:
            break
    job.go_on()
    assert max(shares.values()) < SHARE, shares


def test_the_schedulers_idle_timeout_does_not_end_a_script(mpirun: Mpi) -> None:
    """It ends a cluster without a script; a script may compute for long without tasks."""
    program = """
        import time
        with Client() as client:
            print(client.submit(sum, [1, 2]).result())
            time.sleep(3)
            print(client.submit(sum, [3, 4]).result())
    """
    env = {"DASK_DISTRIBUTED__SCHEDULER__IDLE_TIMEOUT": "1s"}
    assert mpirun.run(program, 1, begin=INITIALIZED, env=env).check().stdout == "3\n7\n"
