"""What a preflight works with; messages of errors as findings, and findings of several ranks as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.check.report import Evidence, Finding, Level, Report, merge, problems
from dask_gpu_mpi.errors import Problem
from support.mocks.preflights import evidence, observed


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


def test_a_problem_as_a_finding() -> None:
    problem = Problem("bad value 'y'", expected="a; b", fix="set z", where="rank 0")
    assert Finding.of("error", "GPUs", problem, "d", (0,)) == Finding(
        "error", "GPUs", "rank 0: bad value 'y' (expected a; b)", "set z", (0,)
    )
    assert Finding.of("error", "GPUs", Problem("no GPU"), "default").fix == "default"


def test_problems_of_one_line() -> None:
    wrong = (Problem("A", fix="b", what="GPUs"), Problem("C", what="host"))
    found = evidence(observed(0), observed(1, problems=wrong))
    assert [*problems(found, "GPUs", "d")] == [Finding("error", "GPUs", "A", "b", (1,))]
    assert [*problems(found, "host", "d")] == [Finding("error", "host", "C", "d", (1,))]
    assert [*problems(found, "launcher", "d")] == []


def test_findings_that_differ_in_their_ranks_alone_are_one() -> None:
    one = Finding("error", "GPUs", "A", "b", (0,))
    findings = [
        one,
        Finding("error", "GPUs", "B", "b", (1,)),
        Finding("error", "GPUs", "A", "b", (1,)),
        Finding("ok", "x", "y"),
    ]
    assert merge(evidence(), findings) == (
        Finding("error", "GPUs", "A", "b", (0, 1), ("h1", "h2")),
        Finding("error", "GPUs", "B", "b", (1,), ("h2",)),
        Finding("ok", "x", "y"),
    )
    # a host that two ranks share, and one that nobody knows
    steps = {0: ("h1", ""), 1: ("h1", "")}
    (merged,) = merge(Evidence(3, steps=steps), [Finding("error", "x", "y", "z", (0, 1, 2))])
    assert (merged.ranks, merged.hosts) == ((0, 1, 2), ("h1",))
