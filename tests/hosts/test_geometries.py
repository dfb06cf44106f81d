"""Shapes of jobs over several hosts that differ, with real processes, and every worker looked at from inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import COMMAND, facts
from support.jobs.gpus import SCRIPT, check_workers, gpu_environ
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, ONLY_VARIABLE, SimHost, make_gpus

GPUS = {"h1": make_gpus(4, host="h1", memory=80 * GIB), "h2": make_gpus(3, host="h2", memory=40 * GIB)}
ALL = [gpu for gpus in GPUS.values() for gpu in gpus]


@pytest.fixture(scope="module")
def env(libdir: Path) -> dict[str, str | None]:
    return gpu_environ(libdir, {host: SimHost(gpus) for host, gpus in GPUS.items()})


def test_a_rank_per_gpu_behind_cgroups_on_hosts_of_different_size(
    mpirun: Mpi, hosts: TestBed, env: dict[str, str | None], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    only = [{ONLY_VARIABLE: place, "CUDA_VISIBLE_DEVICES": "0"} for place in ("0", "1", "3", "2")]
    line = [*COMMAND, str(tmp_path / "script.py")]
    told = facts(mpirun.run(line, 4, bed=hosts, hosts={"h1": 3, "h2": 1}, env=env, per_rank_env=only).check())
    one, two = GPUS["h1"], GPUS["h2"]
    rows = check_workers(told, ALL, {"0-0": [one[0]], "1-1": [one[1]], "2-2": [one[3]], "3-0": [two[2]]})
    assert [rows[name]["host"] for name in ("0-0", "1-1", "2-2", "3-0")] == ["h1", "h1", "h1", "h2"]


def test_gpu_and_cpu_workers_on_gpu_and_cpu_hosts(
    mpirun: Mpi, hosts: TestBed, env: dict[str, str | None], tmp_path: Path
) -> None:
    # two GPUs for each worker, other parts visible on each host; the third host has no driver
    (tmp_path / "script.py").write_text(SCRIPT)
    visible = [
        {"CUDA_VISIBLE_DEVICES": "3,1,0,2"},
        {"CUDA_VISIBLE_DEVICES": f"2,{GPUS['h2'][0].uuid}"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ]
    line = [*COMMAND, "--gpus-per-worker", "2", "--cpu-workers", "1", str(tmp_path / "script.py")]
    done = mpirun.run(line, 3, bed=hosts, env=env, per_rank_env=visible).check()
    told = facts(done)
    one, two = GPUS["h1"], GPUS["h2"]
    rows = check_workers(
        told,
        ALL,
        {"0-0": one[:2], "0-2": one[2:], "1-0": [two[0], two[2]]},
        cpu_workers=["0-cpu-0", "1-cpu-0", "2-cpu-0"],
    )
    assert {name: row["host"] for name, row in rows.items()} == {
        "0-0": "h1", "0-2": "h1", "0-cpu-0": "h1", "1-0": "h2", "1-cpu-0": "h2", "2-cpu-0": "h3",
    }  # fmt: skip
    (warning,) = told["plan"]["warnings"]
    assert "more ranks than GPUs: rank 2 on h3" in warning
