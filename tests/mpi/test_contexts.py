"""Who makes CUDA contexts in a job: workers, each one in its own environment, and nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.jobs.clusters import TELL, facts
from support.jobs.gpus import gpu_environ
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import GIB, LOG_VARIABLE, compile_cuda, driver_folder, make_gpus, read_log

SCRIPT = script("mpi/scripts/contexts.py")
GPUS = make_gpus(2, host="one", memory=80 * GIB)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    """Two GPUs, and a driver that writes down who makes contexts."""
    libraries = f"{compile_cuda(tmp_path / 'lib')}:{driver_folder()}"
    return gpu_environ(GPUS) | {"LD_LIBRARY_PATH": libraries, LOG_VARIABLE: str(tmp_path / "log")}


@pytest.mark.quick("openmpi")
def test_only_workers_touch_cuda_and_a_script_that_did_is_named(
    mpirun: Mpi, environ: dict[str, str | None], tmp_path: Path
) -> None:
    ranks = [{"TEST_RANK": "0"}, {"TEST_RANK": "1"}]
    done = mpirun.run(SCRIPT, 2, env=environ, per_rank_env=ranks).check()
    told = facts(done)
    (warning,) = told["warnings"]
    device = "device 0, GPU-00000000-0000-0000-0000-000000000000"
    assert f"rank 1 on {os.uname().nodename} ({device}). Fix: " in warning
    assert "rank 0" not in warning
    assert f"dask_gpu_mpi: warning: {warning}" in done.stderr
    # ranks, agents, fork servers and the scheduler stay away from CUDA; so does a CPU worker
    on_gpus = {row["pid"] for row in told["workers"] if "GPU" in row["resources"]}
    assert len(on_gpus) == 2
    calls = read_log(tmp_path / "log")
    assert {pid for pid, function in calls if "Ctx" in function} == {*on_gpus, told["guilty"]}
    # one process a host keeps the driver up, without a context, until the workers are there
    assert told["keepers"] == len({pid for pid, _ in calls}) - 3 == 1
    assert told["gone"]


RESTARTS = (
    TELL
    + """
import signal, time
from distributed import Client
from dask_gpu_mpi import initialize

initialize()
client = Client()
tell(seen=sorted(client.run(os.getenv, "CUDA_DEVICE_MAX_CONNECTIONS").values()))
tell(before=looks(client))
victim = looks(client)[0]
os.kill(victim["pid"], signal.SIGKILL)
limit = time.monotonic() + 30
after = []
while (len(after) < 2 or victim["pid"] in [row["pid"] for row in after]) and time.monotonic() < limit:
    time.sleep(0.2)
    try:
        after = looks(client)
    except OSError:
        pass  # of the connection to the one that has gone
tell(after=after)
"""
)


def test_each_worker_makes_one_and_so_does_its_successor(
    mpirun: Mpi, environ: dict[str, str | None], tmp_path: Path
) -> None:
    # CUDA reads its variables once: the context must not be there before them
    (tmp_path / "dask.yaml").write_text("distributed: {nanny: {environ: {CUDA_DEVICE_MAX_CONNECTIONS: 1}}}\n")
    done = mpirun.run(RESTARTS, 2, env=environ | {"DASK_CONFIG": str(tmp_path / "dask.yaml")}).check()
    told = facts(done)
    assert told["seen"] == ["1", "1"]
    before, after = told["before"], told["after"]
    uuids = [gpu.uuid for gpu in GPUS]
    assert [row["visible"] for row in before] == [row["visible"] for row in after] == uuids
    assert before[1]["pid"] == after[1]["pid"]
    # each has made one, and nobody else
    made = sorted(pid for pid, what in read_log(tmp_path / "log") if "Retain" in what)
    assert made == sorted({row["pid"] for row in (*before, *after)})
    assert "Traceback" not in done.stderr
