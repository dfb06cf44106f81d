"""The main job on GPUs that are simulated: the unmodified CUDAWorker, one for each, seen from inside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from clusters import COMMAND, TELL, facts, scratch_of, workers_of
from harness import Mpi
from simulated.nvml import GIB, VARIABLE, SimGpu, compile_nvml, make_gpus, simulated_environ

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")

CORES = sorted(os.sched_getaffinity(0))
#: Two sockets, where this machine has cores for them.
SOCKETS = [tuple(CORES[: (len(CORES) + 1) // 2]), tuple(CORES[len(CORES) // 2 :])]
GPUS = make_gpus(4, host="one", memory=80 * GIB, cores=SOCKETS)

SCRIPT = (
    TELL
    + """
import dask
from distributed import Client
from dask_gpu_mpi import current_session

def where():
    from distributed import get_worker
    return str(get_worker().name)

client = Client()
rows = looks(client)
steered = {}
for key in ("GPU", "CPU"):
    if any(key in row["resources"] for row in rows):
        with dask.annotate(resources={key: 1}):
            tasks = [dask.delayed(where, pure=False)() for _ in range(12)]
        steered[key] = sorted(set(dask.compute(*tasks, scheduler=client, optimize_graph=False)))
tell(workers=rows, plan=current_session().plan.as_json(), steered=steered)
"""
)


@pytest.fixture(scope="module")
def libdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_nvml(tmp_path_factory.mktemp("nvml"))


def gpu_environ(libdir: Path, gpus: Any = GPUS) -> dict[str, str | None]:
    """What makes a job see these GPUs, and no others."""
    environ = simulated_environ(libdir, gpus, {})
    return {"CUDA_VISIBLE_DEVICES": None, **environ, VARIABLE: environ[VARIABLE]}


def check_workers(told: dict[str, Any], gpus: tuple[SimGpu, ...] = GPUS) -> dict[str, dict[str, Any]]:
    """One worker per GPU, each exactly as the plan has it; returns the looks by name."""
    rows, plan = workers_of(told), told["plan"]
    assert sorted(rows) == sorted(str(worker["name"]) for worker in plan["workers"])
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    seen = []
    for worker in plan["workers"]:
        row = rows[str(worker["name"])]
        assert row["identity"] == []
        assert row["nthreads"] == worker["nthreads"]
        assert row["memory"] == worker["memory_limit"] > 0
        assert row["resources"] == worker["resources"]
        if worker["kind"] == "gpu":
            gpu = by_uuid[worker["device"]]
            seen.append(gpu.uuid)
            assert worker["name"] == f"{worker['rank']}-{gpus.index(gpu)}"
            assert worker["resources"] == {"GPU": 1}
            assert row["visible"] == gpu.uuid
            assert row["device"] == int(0.8 * gpu.memory)  # type: ignore[operator]
            assert row["affinity"] == sorted(gpu.cores or CORES) == worker["cpus"]
        else:
            assert row["visible"] == ""
            assert row["device"] is None
    assert sorted(seen) == sorted(by_uuid)
    total = sum(row["memory"] for row in rows.values())
    assert total <= sum(host["memory"] for host in plan["hosts"])
    assert len({row["seed"] for row in rows.values()}) == 1
    return rows


def test_one_rank_and_a_cpu_worker(mpirun: Mpi, libdir: Path, tmp_path: Path) -> None:
    env = gpu_environ(libdir)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = mpirun.run([*COMMAND, "--cpu-workers", "1", str(script)], 1, env=env).check()
    told = facts(done)
    rows = check_workers(told)
    gpu_names = [f"0-{index}" for index in range(4)]
    assert sorted(rows) == [*gpu_names, "0-cpu-0"]
    assert rows["0-cpu-0"]["resources"] == {"CPU": rows["0-cpu-0"]["nthreads"]}
    assert told["steered"]["CPU"] == ["0-cpu-0"]
    assert set(told["steered"]["GPU"]) <= set(gpu_names)
    assert scratch_of(mpirun.jobs[-1]) == []
    alone = mpirun.run([*COMMAND, "plan", "--cpu-workers", "1", "--json"], 1, env=env).check()
    assert json.loads(alone.stdout) == told["plan"]


def test_two_ranks_share_the_gpus(mpirun: Mpi, libdir: Path) -> None:
    before = (
        "from dask_gpu_mpi import initialize\ninitialize(worker_class='dask_cuda.CUDAWorker', nthreads=2)\n"
    )
    done = mpirun.run(before + SCRIPT, 2, env=gpu_environ(libdir)).check()
    told = facts(done)
    rows = check_workers(told)
    assert sorted(rows) == ["0-0", "0-1", "1-2", "1-3"]
    assert {row["nthreads"] for row in rows.values()} == {2}
    assert told["steered"].keys() == {"GPU"}
    assert scratch_of(mpirun.jobs[-1]) == []


def test_three_ranks_share_four_gpus(mpirun: Mpi, libdir: Path) -> None:
    before = "from dask_gpu_mpi import initialize\ninitialize()\n"
    told = facts(mpirun.run(before + SCRIPT, 3, env=gpu_environ(libdir)).check())
    rows = check_workers(told)
    ranks = [worker["rank"] for worker in told["plan"]["workers"]]
    assert sorted(ranks.count(rank) for rank in range(3)) == [1, 1, 2]
    assert len(rows) == 4


def test_each_rank_has_gpus_of_its_own(mpirun: Mpi, libdir: Path) -> None:
    # by index and by UUID, whole and abbreviated
    visible = [
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"CUDA_VISIBLE_DEVICES": f"{GPUS[0].uuid},{GPUS[2].uuid[:12]}"},
    ]
    before = "from dask_gpu_mpi import initialize\ninitialize()\n"
    done = mpirun.run(before + SCRIPT, 2, env=gpu_environ(libdir), per_rank_env=visible).check()
    rows = check_workers(facts(done))
    assert sorted(rows) == ["0-1", "0-3", "1-0", "1-2"]
