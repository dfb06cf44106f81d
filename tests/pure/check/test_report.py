"""What a preflight works with."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.check.report import Evidence, Finding, Level, Report
from preflights import evidence, facts


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
    silent = Evidence(3, doing={1: ("h7", "the local directory")})
    assert [silent.host(rank) for rank in (1, 2)] == ["h7", ""]


def test_ranks_are_put_together_by_host() -> None:
    ranks = {rank: facts(rank) for rank in (1, 0)}
    found = Evidence(2, facts=ranks).by_host()
    assert [[one.rank for one in host] for host in found.values()] == [[0], [1]]
    assert [host for host, _ in found] == ["h1", "h2"]
