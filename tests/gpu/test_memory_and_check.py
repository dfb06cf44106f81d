"""Device memory that others hold, workers of several GPUs, contexts that came too early, and the preflight: on real GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, facts, workers_of
from support.jobs.mpi import Mpi

HOLD = """
import sys
import numpy as np
import numba.cuda
kept = numba.cuda.device_array(4 << 30, dtype=np.uint8)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy(gpus: Any) -> Iterator[str]:
    """UUID of a GPU on which a process of somebody else's holds four GiB."""
    gpus.check_idle()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": gpus.uuids[0], "PYTHONPATH": ""},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield gpus.uuids[0]
    finally:
        holder.communicate("")
    gpus.check_idle()


def test_memory_in_use(mpirun: Mpi, gpus: Any, busy: str) -> None:
    plan = json.loads(mpirun.run([*COMMAND, "plan", "--json"], 1).check().stdout)
    (warning,) = plan["warnings"]
    assert busy in warning
    assert "in use by other processes" in warning
    mpirun.run([*COMMAND, "plan", "--require-idle-gpus"], 2).refused(busy)
    mpirun.run("from dask_gpu_mpi import initialize\ninitialize(require_idle_gpus=True)\n", 2).refused(busy)
    mpirun.run([*COMMAND, "--worker-options", '{"rmm_pool_size": 0.99}'], 1).refused(busy, "free")


def test_pool_that_cannot_fit(mpirun: Mpi, gpus: Any) -> None:
    options = json.dumps({"rmm_pool_size": gpus.memory[0] + (1 << 30)})
    mpirun.run([*COMMAND, "--worker-options", options], 2).refused("rmm_pool_size", gpus.uuids[0])


def test_workers_of_two_gpus(mpirun: Mpi, gpus: Any) -> None:
    if len(gpus.uuids) < 2:
        pytest.skip("two GPUs needed; tests/mpi/test_geometries.py has emulated ones")
    script = """
from support.jobs.scripts.tell import look, tell
from dask_gpu_mpi import initialize
from distributed import Client
session = initialize(gpus_per_worker=2)
client = Client()
def cuda(dask_worker):
    import numba.cuda
    uuids = [gpu.uuid if isinstance(gpu.uuid, str) else gpu.uuid.decode() for gpu in numba.cuda.gpus]
    return {**look(dask_worker), "uuids": uuids}
tell(workers=list(client.run(cuda).values()))
"""
    rows = workers_of(facts(mpirun.run(script, 1, timeout=120).check()))
    count = len(gpus.uuids) // 2
    assert sorted(rows) == [f"0-{2 * i}" for i in range(count)]
    seen = [row["uuids"] for row in rows.values()]
    assert all(len(uuids) == 2 for uuids in seen), seen
    assert sorted(uuid for uuids in seen for uuid in uuids) == sorted(gpus.uuids[: 2 * count])
    assert all(row["resources"] == {"GPU": 2} for row in rows.values()), rows
    gpus.check_idle()


def test_context_before_the_cluster(mpirun: Mpi, gpus: Any) -> None:
    script = (
        "import numba.cuda\nnumba.cuda.current_context()\n"
        "from dask_gpu_mpi import initialize\nfrom distributed import Client\n"
        "initialize()\nassert Client().submit(abs, -5).result() == 5\n"
    )
    done = mpirun.run(script, 1, timeout=120).check()
    (warning,) = [line for line in done.stderr.splitlines() if "contexts were made before" in line]
    assert gpus.uuids[0] in warning
    assert "rank 0 on " in warning
    gpus.check_idle()


def test_check(mpirun: Mpi, gpus: Any) -> None:
    """The preflight runs a kernel on each GPU, and transfers the memory of GPUs; it leaves none in use."""
    done = mpirun.run([*COMMAND, "check", "--json"], 2)
    data = json.loads(done.stdout)
    (host,) = data["hosts"]
    assert [gpu["uuid"] for gpu in host["gpus"]] == list(gpus.uuids)
    kernel, *_ = [found for found in data["findings"] if found["what"] == "kernel"]
    assert kernel["level"] == "ok", kernel
    assert data["exit_code"] == done.rc == 0, data["findings"]
    assert len(data["transfers"]) == (len(gpus.uuids) if len(gpus.uuids) > 1 else 0)
    assert [
        one for one in data["transfers"] if not one["gpu_memory"] or not one["rate"] or one["error"]
    ] == []
    gpus.check_idle()
