"""What the benchmarks have measured without a job."""

from __future__ import annotations

import sys

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scale


def test_the_start_of_many_ranks_is_linear_in_bytes() -> None:
    rows = [scale.simulate(size) for size in (64, 512)]
    slopes = scale.exponents(rows)
    for step in ("gather", "scatter", "go"):
        assert slopes[f"{step}, bytes"]["64-512"] < 1.1
    # and no rank but the client's is sent what grows with the job
    assert rows[1]["steps"]["scatter"]["largest"] < rows[0]["steps"]["scatter"]["largest"] + 200
