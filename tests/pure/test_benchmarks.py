"""What the benchmarks make of what they have measured."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

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


def test_the_start_of_many_ranks_is_linear_in_bytes() -> None:
    rows = [scale.simulate(size) for size in (64, 512)]
    slopes = scale.exponents(rows)
    for step in ("gather", "scatter", "go"):
        assert slopes[f"{step}, bytes"]["64-512"] < 1.1
    # and no rank but the client's is sent what grows with the job
    assert rows[1]["steps"]["scatter"]["largest"] < rows[0]["steps"]["scatter"]["largest"] + 200
