"""What the benchmarks make of what they have measured."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """One of the programs, imported as it imports its neighbours."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[0]


common, scale, startup = map(benchmark, ("common", "scale", "startup"))


def test_a_job_is_ended_whatever_it_does() -> None:
    code = "import subprocess, sys; note('ready'); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with common.Job(code) as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=20.0) is not None
        assert job.members()
        assert not job.wait_for_end(0.0)
    assert not job.members()
    assert not job.folder.exists()


def test_a_job_that_fails_is_not_waited_for() -> None:
    with common.Job("sys.exit('no such thing')") as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=3600.0) is None
        assert (job.code, job.output()) == (1, "no such thing\n")


def test_a_job_has_ended_when_its_exit_code_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, by which processes are found, is gone a moment before."""
    with common.Job("note('ready'); pause(); sys.exit(3)") as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=20.0) is not None
        with monkeypatch.context() as patch:
            patch.setattr(common, "members", lambda mark: {})
            assert not job.wait_for_end(0.0)
            job.go_on()
            assert job.wait_for_end(20.0)
            assert job.code == 3


def test_ratios_are_taken_within_a_round() -> None:
    runs = [
        startup.Run(way, number, ready_s=seconds, pss_mib={"rank": 10.0})
        for way, times in (("dask_gpu_mpi", (1.0, 2.0, 3.0)), ("dask-mpi", (2.0, 8.0, 6.0)))
        for number, seconds in enumerate(times)
    ]
    runs[-1].killed, runs[-1].failure = True, "did not end by itself"
    rows = startup.summary(runs)
    assert rows["dask-mpi"]["ready_s"] == 6.0
    assert rows["dask-mpi"]["ours_over_this"]["ready_s"] == 0.5  # of 1/2, 2/8 and 3/6
    assert rows["dask-mpi"]["ours_over_this"]["end_s"] is None
    assert (rows["dask-mpi"]["killed"], rows["dask-mpi"]["failures"]) == (1, ["did not end by itself"])
    assert rows["dask_gpu_mpi"]["pss_total"] == 10.0


def test_the_start_of_many_ranks_is_linear_in_bytes() -> None:
    rows = [scale.simulate(size) for size in (64, 512)]
    slopes = scale.exponents(rows)
    for step in ("gather", "scatter", "go"):
        assert slopes[f"{step}, bytes"]["64-512"] < 1.1
    # and no rank but the client's is sent what grows with the job
    assert rows[1]["steps"]["scatter"]["largest"] < rows[0]["steps"]["scatter"]["largest"] + 200


def test_an_attacks_cost_is_a_ratio_within_trials() -> None:
    """A machine that is slower in one trial than in another changes both of its runs."""
    rounds = [
        {
            "undisturbed": {"seconds": seconds, "lines": 3, "code": 0},
            "attacked": {"seconds": 1.1 * seconds, "lines": 5, "code": 0},
        }
        for seconds in (1.0, 2.0, 10.0)
    ]
    found = benchmark("intruders").summary(rounds)
    assert found == {"undisturbed_s": 2.0, "attacked_s": 2.2, "ratio": 1.1, "lines": 5, "codes": [0]}
