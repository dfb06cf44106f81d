"""What the benchmarks make of what they have measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """One of the programs, imported as it imports its neighbours."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[0]


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return benchmark("common")


@pytest.fixture(scope="module")
def startup() -> ModuleType:
    return benchmark("startup")


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return benchmark("scale")


def test_ratios_are_taken_within_a_round(startup: ModuleType) -> None:
    runs = [
        startup.Run(way, number, ready_s=seconds, pss_mib={"rank": 10.0})
        for way, times in (("dask_gpu_mpi", (1.0, 2.0, 3.0)), ("dask-mpi", (2.0, 8.0, 6.0)))
        for number, seconds in enumerate(times)
    ]
    runs[-1].killed = True
    rows = startup.summary(runs)
    assert rows["dask-mpi"]["ready_s"] == 6.0
    assert rows["dask-mpi"]["ours_over_this"]["ready_s"] == 0.5  # of 1/2, 2/8 and 3/6
    assert rows["dask-mpi"]["ours_over_this"]["end_s"] is None
    assert rows["dask-mpi"]["killed"] == 1
    assert rows["dask_gpu_mpi"]["pss_total"] == 10.0


def test_what_a_process_is(common: ModuleType) -> None:
    agent = "python -c import json; from dask_gpu_mpi.agent import main"
    found = {
        1: (0, "/bin/mpirun -np 1"),
        2: (1, "python -m dask_gpu_mpi script.py"),
        3: (2, agent),
        4: (3, agent),
        5: (4, agent),
        6: (4, agent),
        7: (3, "python -c from multiprocessing.resource_tracker import main"),
        8: (2, "python -c from multiprocessing.spawn import spawn_main"),
    }
    kinds = [common.kind_of(pid, found, 6) for pid in found]
    assert kinds == ["launcher", "rank", "agent", "fork server", "worker", "scheduler", "tracker", "worker"]


def test_the_start_of_many_ranks_is_linear_in_bytes(scale: ModuleType) -> None:
    rows = [scale.simulate(size) for size in (64, 512)]
    slopes = scale.exponents(rows)
    for step in ("gather", "scatter", "go"):
        assert slopes[f"{step}, bytes"]["64-512"] < 1.1
    # and no rank but the client's is sent what grows with the job
    assert rows[1]["steps"]["scatter"]["largest"] < rows[0]["steps"]["scatter"]["largest"] + 200
