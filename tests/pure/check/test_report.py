"""What a preflight works with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.check.report import Evidence, Finding, Level, Report
from preflights import evidence, observed


@pytest.mark.parametrize(
    ("levels", "worst", "code"),
    [
        ((), "ok", 0),
        (("ok", "ok"), "ok", 0),
        (("ok", "warning"), "warning", 0),
        (("warning", "error", "ok"), "error", 1),
    ],
)
def test_the_worst_finding_counts(levels: tuple[Level, ...], worst: Level, code: int) -> None:
    report = Report(Evidence(1), tuple(Finding(level, "what", "found") for level in levels))
    assert (report.level, report.exit_code) == (worst, code)


def test_where_a_rank_runs() -> None:
    assert evidence().host(1) == "h2"
    silent = Evidence(3, steps={1: ("h7", "the local directory")})
    assert [silent.host(rank) for rank in (1, 2)] == ["h7", ""]


def test_ranks_are_put_together_by_node() -> None:
    ranks = (
        observed(0),
        replace(observed(0), rank=1),
        replace(observed(1), rank=2),
        replace(observed(1), rank=3, boot_id="x"),
    )
    found = Evidence(4, observations={one.rank: one for one in ranks}).by_host()
    assert [[one.rank for one in node] for node in found.values()] == [[0, 1], [2], [3]]
    assert [host for host, _ in found] == ["h1", "h2", "h2"]


def test_inventories_and_gpus_of_all_ranks() -> None:
    found = evidence(observed(0), observed(1, inventory=None))
    assert [inventory.rank for inventory in found.inventories] == [0]
    assert list(found.gpus) == ["GPU-h1-0", "GPU-h1-1"]
