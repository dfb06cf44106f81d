"""Who makes CUDA contexts in a job: workers, each one in its own environment, and nobody else."""

from __future__ import annotations

import os
from pathlib import Path

from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import GIB, LOG_VARIABLE, compile_cuda, driver_folder, make_gpus, read_log

SCRIPT = script("mpi/scripts/contexts.py")
GPUS = make_gpus(2, host="one", memory=80 * GIB)


def test_only_workers_touch_cuda_each_once_and_a_script_that_did_is_named(
    mpirun: Mpi, tmp_path: Path
) -> None:
    # a driver that writes down who makes contexts
    libraries = f"{compile_cuda(tmp_path / 'lib')}:{driver_folder()}"
    env = {"LD_LIBRARY_PATH": libraries, LOG_VARIABLE: str(tmp_path / "log"), "DASK_CONFIG": str(tmp_path)}
    ranks = [{"TEST_RANK": "0"}, {"TEST_RANK": "1"}]
    # CUDA reads its variables once: the context must not be there before them
    (tmp_path / "dask.yaml").write_text("distributed: {nanny: {environ: {CUDA_DEVICE_MAX_CONNECTIONS: 1}}}\n")
    done = mpirun.run(SCRIPT, 2, gpus=GPUS, env=env, per_rank_env=ranks).check()
    told = facts(done)
    (warning,) = told["warnings"]
    device = "device 0, GPU-00000000-0000-0000-0000-000000000000"
    assert f"rank 1 on {os.uname().nodename} ({device}). Fix: " in warning
    assert "rank 0" not in warning
    assert f"dask_gpu_mpi: warning: {warning}" in done.stderr
    assert told["seen"] == ["1", "1", "1"]
    # one of them was killed, and is there again
    before, after = (
        [row for row in told[when] if "GPU" in row["resources"]] for when in ("workers", "after")
    )
    assert (
        [row["visible"] for row in before] == [row["visible"] for row in after] == [gpu.uuid for gpu in GPUS]
    )
    assert [one["pid"] == other["pid"] for one, other in zip(before, after, strict=True)] == [False, True]
    # ranks, agents, fork servers and the scheduler stay away from CUDA; so does a CPU worker
    on_gpus = {row["pid"] for row in (*before, *after)}
    calls = read_log(tmp_path / "log")
    assert {pid for pid, function in calls if "Ctx" in function} == {*on_gpus, told["guilty"]}
    assert sorted(pid for pid, function in calls if "Retain" in function) == sorted(
        {*on_gpus, told["guilty"]}
    )
    # one process a host keeps the driver up, without a context, until the workers are there
    assert told["keepers"] == len({pid for pid, _ in calls}) - 4 == 1
    assert told["gone"]
    assert "Traceback" not in done.stderr
