"""Who makes CUDA contexts in a job: workers, and nobody else; and what the script has made before is told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from clusters import TELL, facts
from gpujobs import gpu_environ
from harness import Mpi
from simulated.cuda import LOG_VARIABLE, compile_cuda, read_log
from simulated.nvml import GIB, compile_nvml, make_gpus

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")

SCRIPT = (
    TELL
    + """
import ctypes, time
from distributed import Client
from dask_gpu_mpi import initialize

cuda = ctypes.CDLL("libcuda.so.1")  # loaded, on every rank
if os.environ["TEST_RANK"] == "1":
    cuda.cuInit(0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    tell(guilty=os.getpid())
session = initialize(cpu_workers=1)
rows = looks(Client())
tell(workers=rows, warnings=[*map(str, session.plan.warnings)])

# who has initialised the driver, but made no context
calls = [line.split() for line in open(os.environ["SIMULATED_CUDA_LOG"])]
keepers = {pid for pid, _ in calls} - {pid for pid, function in calls if "Ctx" in function}
limit = time.monotonic() + 10
while any(map(os.path.exists, map("/proc/{}".format, keepers))) and time.monotonic() < limit:
    time.sleep(0.01)
tell(keepers=len(keepers), gone=time.monotonic() < limit)
"""
)


def test_only_workers_touch_cuda_and_a_script_that_did_is_named(mpirun: Mpi, tmp_path: Path) -> None:
    log = tmp_path / "log"
    gpus = make_gpus(2, host="one", memory=80 * GIB)
    env = gpu_environ(compile_nvml(tmp_path / "lib"), gpus) | {LOG_VARIABLE: str(log)}
    compile_cuda(tmp_path / "lib")
    ranks = [{"TEST_RANK": "0"}, {"TEST_RANK": "1"}]
    done = mpirun.run(SCRIPT, 2, env=env, per_rank_env=ranks).check()
    told = facts(done)
    (warning,) = told["warnings"]
    device = "device 0, GPU-00000000-0000-0000-0000-000000000000"
    assert f"rank 1 on {os.uname().nodename} ({device}). Fix: " in warning
    assert "rank 0" not in warning
    assert f"dask_gpu_mpi: warning: {warning}" in done.stderr
    # ranks, agents, fork servers and the scheduler stay away from CUDA; so does a CPU worker
    on_gpus = {row["pid"] for row in told["workers"] if "GPU" in row["resources"]}
    assert len(on_gpus) == 2
    calls = read_log(log)
    assert {pid for pid, function in calls if "Ctx" in function} == {*on_gpus, told["guilty"]}
    # one process a host keeps the driver up, without a context, until the workers are there
    assert told["keepers"] == len({pid for pid, _ in calls}) - 3 == 1
    assert told["gone"]
