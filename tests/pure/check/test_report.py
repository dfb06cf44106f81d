"""The report of a check: findings of several ranks as one; the table, and the JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dask_gpu_mpi.base.text import plain_text
from dask_gpu_mpi.check.report import Finding, Level, Report, as_data, display, merge
from dask_gpu_mpi.check.tasks import KernelResult
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.scratch import Scratch
from support.mocks.preflights import GIB, VERSIONS, evidence, gpu, inventory, observed


@pytest.mark.parametrize(
    ("levels", "worst", "code"),
    [((), "ok", 0), (("ok", "warning"), "warning", 0), (("warning", "error", "ok"), "error", 1)],
)
def test_the_worst_finding_counts(levels: tuple[Level, ...], worst: Level, code: int) -> None:
    report = Report(tuple(Finding(level, "what", "found") for level in levels))
    assert (report.level, report.exit_code) == (worst, code)


def test_findings_that_differ_in_their_ranks_alone_are_one() -> None:
    findings = [
        Finding("error", "GPUs", "A", "b", (0,)),
        Finding("error", "GPUs", "B", "b", (1,)),
        Finding("error", "GPUs", "A", "b", (1,)),
        Finding("ok", "x", "y"),
    ]
    assert merge(evidence(), findings) == (
        Finding("error", "GPUs", "A", "b", (0, 1), ("h1", "h2")),
        Finding("error", "GPUs", "B", "b", (1,), ("h2",)),
        Finding("ok", "x", "y"),
    )
    # a host that two ranks share, and a rank that is not known
    shared = evidence(inventory(0), inventory(1, host="h1"))
    (merged,) = merge(shared, [Finding("error", "x", "y", "z", (0, 1, 2))])
    assert (merged.ranks, merged.hosts) == ((0, 1, 2), ("h1",))


def render(report: Report) -> str:
    return plain_text(display(report))


def many_kinds() -> Report:
    """Three nodes with little in common, and findings of all levels."""
    gpus = (
        gpu("h1", 0, processes=((999, 5 * GIB),)),
        Gpu("MIG-a", 1, "A", 0, slice=0),
        gpu("h1", 2, processes=((999, None),), numa=0),
    )
    inventories = [
        inventory(0, size=4, gpus=0, cpus=(0, 1)),
        inventory(1, size=4, gpus=0, host="h1", cpus=(4,)),
        inventory(2, size=4, gpus=0, host="h2", memory=0),
        inventory(3, size=4, gpus=0, host="h3", memory=GIB),
    ]
    inventories[0] = replace(inventories[0], gpus=gpus)
    ranks = {
        0: observed(ecc={"MIG-a": 3}),
        1: observed(scratch=Scratch("/other")),
        2: observed({"dask": "1"}, driver="", scratch=Scratch("/s", free=0)),
    }
    kernels = {
        "GPU-h1-0": KernelResult("", "", 1.23456),
        "MIG-a": KernelResult("cuda", "x", 2.0),
        "GPU-h1-2": KernelResult("slow", "x"),
    }
    found = evidence(*inventories, kernels=kernels, clocks={1: -0.00123, 2: 0.5})
    first, second, *_ = found.transfers
    found = replace(found, observations=ranks, transfers=(first, replace(second, error="late", seconds=None)))
    findings = (
        Finding("ok", "launcher", "fine"),
        Finding("warning", "GPUs", "busy", "stop them", (0, 1), ("h1",)),
        Finding("error", "ranks", "silent", "inspect it", (2,)),
        Finding("error", "ranks", "everywhere", "inspect all", (0, 1, 2, 3), ("h1", "h2")),
    )
    return Report(findings, found, 1.2649)


TABLE = """\
check of 4 ranks on 3 nodes, 1.3 s

  ok       launcher  fine
  warning  GPUs      ranks 0-1 on h1: busy
                     Fix: stop them
  ERROR    ranks     rank 2: silent
                     Fix: inspect it
  ERROR    ranks     everywhere
                     Fix: inspect all

PLAN

ERROR: 2 errors, 1 warning"""


def test_the_whole_table() -> None:
    """The findings, then the plan without its warnings, which are findings."""
    report = many_kinds()
    assert report.evidence is not None
    assert report.evidence.plan.warnings
    plan = replace(report.evidence.plan, warnings=()).table()
    assert render(report) == TABLE.replace("PLAN", plan)


def test_a_start_that_has_failed_has_its_findings_alone() -> None:
    report = Report((Finding("error", "scratch", "full", "empty it", (1,), ("h2",)),), seconds=0.5)
    assert render(report).splitlines() == [
        "  ERROR    scratch  rank 1 on h2: full",
        "                    Fix: empty it",
        "",
        "ERROR: 1 error, 0 warnings",
    ]
    data = as_data(report)
    assert (data["scheduler"], data["world_size"], data["hosts"], data["exit_code"]) == (None, None, [], 1)
    assert data.keys() == as_data(many_kinds()).keys()


def test_the_whole_json() -> None:
    data = json.loads(json.dumps(as_data(many_kinds())))
    assert data["scheduler"] == {"rank": 0, "host": "h1", "address": "10.0.0.1"}
    assert (data["seconds"], data["world_size"], data["mpi_library"]) == (1.265, 4, "Open MPI v5.0.11")
    assert data["findings"][1] == {
        "level": "warning", "what": "GPUs", "found": "busy", "remedy": "stop them", "ranks": [0, 1], "hosts": ["h1"],
    }  # fmt: skip
    one, two, three = data["hosts"]
    assert (one["ranks"], one["memory"], one["driver"]) == ([0, 1], 64 * GIB, "580.1")
    keys = ("index", "in_use", "ecc_uncorrected", "kernel", "kernel_seconds", "numa")
    assert [tuple(each[key] for key in keys) for each in one["gpus"]] == [
        (0, 5 * GIB, None, "ok", 1.235, None),
        (1, 0, 3, "cuda", 2.0, None),
        (2, None, None, "slow", 0.0, 0),
    ]
    assert one["scratch"] == [
        {"ranks": [0], "path": "/scratch", "filesystem": "ext4", "free": 100 * GIB},
        {"ranks": [1], "path": "/other", "filesystem": None, "free": None},
    ]
    assert (two["memory"], two["driver"], two["scratch"][0]["free"]) == (None, None, 0)
    assert (three["memory"], three["driver"], three["scratch"]) == (GIB, None, [])
    assert [host["clock_ahead"] for host in (one, two, three)] == [-0.0012, 0.5, None]
    assert [group["ranks"] for group in data["versions"]] == [[0, 1], [2]]
    assert data["versions"][0]["versions"] == VERSIONS
    assert data["transfers"] == [
        {
            "from": "0-0", "to": "0-1", "between_nodes": False, "gpu_memory": True, "bytes": 10**9, "rate": 2 * 10**9,
            "error": None,
        },
        {
            "from": "0-1", "to": "0-2", "between_nodes": False, "gpu_memory": True, "bytes": 10**9, "rate": None,
            "error": "late",
        },
    ]  # fmt: skip


@pytest.mark.parametrize("number", [12, 14])
def test_findings_beyond_a_dozen_are_counted(number: int) -> None:
    findings = tuple(Finding("error", "ranks", f"number {one}.", "fix it") for one in range(number))
    text = render(Report((*findings, Finding("warning", "ranks", "one more"))))
    assert (text.count("number "), text.count("fix it"), text.count("one more")) == (12, 12, 1)
    assert ("ranks  2 more like these; --json has them all" in text) == (number > 12)
