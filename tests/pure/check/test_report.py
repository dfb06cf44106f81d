"""What a preflight works with: findings of several ranks as one; and what it prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.base.tables import text_of
from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.report import (
    Evidence,
    Finding,
    Level,
    Report,
    as_data,
    display,
    merge,
)
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.options.model import Options
from support.mocks.preflights import GIB, evidence, gpu, observed


@pytest.mark.parametrize(
    ("levels", "worst", "code"),
    [((), "ok", 0), (("ok", "warning"), "warning", 0), (("warning", "error", "ok"), "error", 1)],
)
def test_the_worst_finding_counts(levels: tuple[Level, ...], worst: Level, code: int) -> None:
    report = Report(Evidence(1), tuple(Finding(level, "what", "found") for level in levels))
    assert (report.level, report.exit_code) == (worst, code)


def test_ranks_are_put_together_by_node() -> None:
    ranks = (
        observed(0),
        replace(observed(0), rank=1),
        replace(observed(1), rank=2),
        replace(observed(1), rank=3, boot_id="x"),
    )
    found = Evidence(4, observations={one.rank: one for one in ranks}).by_host()
    assert [[one.rank for one in node] for node in found] == [[0, 1], [2], [3]]
    assert [node[0].host for node in found] == ["h1", "h2", "h2"]


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


def render(report: Report) -> str:
    return text_of(display(report))


def test_the_ranks_are_not_the_users_of_a_gpu() -> None:
    base = observed(0)
    assert base.inventory is not None
    gpus = (gpu("h1", 0, processes=((base.inventory.pid, GIB),)), gpu("h1", 1, processes=((99999, None),)))
    seen = evidence(replace(base, inventory=replace(base.inventory, gpus=gpus)))
    (host,) = as_data(Report(seen, apply_rules(seen), 1.0))["hosts"]
    assert [one["in_use"] for one in host["gpus"]] == [0, None]


def many_kinds() -> Report:
    """Three nodes with little in common, and findings of all levels."""
    one, cpus = observed(0), observed(1, gpus=0)
    assert one.inventory is not None
    assert cpus.inventory is not None
    busy, some = ((999, 5 * GIB),), ((999, None),)
    gpus = (
        gpu("h1", 0, processes=busy),
        Gpu("MIG-a", 1, "A", 0, slice=0),
        gpu("h1", 2, processes=some, numa=0),
    )
    inventory = replace(one.inventory, gpus=gpus)
    first = replace(one, inventory=inventory, ecc={"MIG-a": 3})
    beside = replace(inventory, rank=1, pid=2, cpus=(4,))
    second = replace(first, rank=1, inventory=beside, scratch=Scratch("/other"))
    bare = replace(cpus.inventory, rank=2, memory=0)
    third = replace(cpus, rank=2, inventory=bare, scratch=Scratch("/s", free=0))
    fourth = replace(third, rank=3, host="h3", inventory=None, scratch=Scratch("/s", "nfs", "/s", GIB))
    kernels = {
        0: (KernelResult("GPU-h1-0", "", "", 1.23456),),
        1: (KernelResult("MIG-a", "cuda", "x", 2.0),),
    }
    reached = {1: Reach("", -0.00123), 2: Reach("refused")}
    all_ranks = dict(enumerate((first, second, third, fourth)))
    options = Options(scheduler_rank=1)
    found = Evidence(4, options, all_ranks, address="10.0.0.1", kernels=kernels, reached=reached)
    findings = (
        Finding("ok", "launcher", "fine"),
        Finding("warning", "GPUs", "busy", "stop them", (0, 1), ("h1",)),
        Finding("error", "ranks", "silent", "inspect it", (2,)),
        Finding("error", "ranks", "everywhere", "inspect all", (0, 1, 2, 3), ("h1", "h2")),
    )
    return Report(found, findings, 1.2649)


TABLE = """\
check of 4 ranks on 3 nodes, 1.3 s

  ok       launcher  fine
  warning  GPUs      ranks 0-1 on h1: busy
                     Fix: stop them
  ERROR    ranks     rank 2: silent
                     Fix: inspect it
  ERROR    ranks     everywhere
                     Fix: inspect all

node h1: ranks 0-1, cores 0-1,4, 64.00 GiB, driver 580.1, scratch /scratch (ext4, 100.00 GiB free), clock -0.001 s
  GPU  name         UUID      memory      cores        in use    ECC  kernel
  0    NVIDIA H200  GPU-h1-0  141.00 GiB  0-1          5.00 GiB  -    ok
  1:0  A            MIG-a     -           -            -         3    FAILED
  2    NVIDIA H200  GPU-h1-2  141.00 GiB  0-1, NUMA 0  some      -    -

node h2: rank 2, cores 0-1, memory unknown, scratch /s (unknown, 0 B free)

node h3: rank 3, scratch /s (nfs, 1.00 GiB free)

ERROR: 2 errors, 1 warning"""


def test_the_whole_table() -> None:
    assert render(many_kinds()) == TABLE
    assert render(Report(Evidence(0), ())) == "\nok: 0 errors, 0 warnings"


def test_the_whole_json() -> None:
    data = as_data(many_kinds())
    assert data["scheduler"] == {"rank": 1, "host": "h1", "address": "10.0.0.1"}
    assert (data["seconds"], data["world_size"]) == (1.265, 4)
    assert data["findings"][1] == {
        "level": "warning", "what": "GPUs", "found": "busy", "remedy": "stop them", "ranks": [0, 1], "hosts": ["h1"],
    }  # fmt: skip
    one, two, three = data["hosts"]
    assert (one["ranks"], one["cpus"], one["memory"], one["driver"]) == ([0, 1], [0, 1, 4], 64 * GIB, "580.1")
    keys = ("index", "in_use", "ecc_uncorrected", "kernel", "kernel_seconds", "numa")
    assert [tuple(each[key] for key in keys) for each in one["gpus"]] == [
        (0, 5 * GIB, None, "ok", 1.235, None),
        (1, 0, 3, "cuda", 2.0, None),
        (2, None, None, None, None, 0),
    ]
    assert one["scratch"] == [
        {"ranks": [0], "path": "/scratch", "filesystem": "ext4", "free": 100 * GIB},
        {"ranks": [1], "path": "/other", "filesystem": None, "free": None},
    ]
    assert (two["memory"], two["driver"], two["scratch"][0]["free"]) == (0, None, 0)
    assert (three["memory"], three["cpus"], three["scratch"][0]["free"]) == (None, [], GIB)
    assert [host["clock_ahead"] for host in (one, two, three)] == [-0.0012, None, None]
    assert [group["ranks"] for group in data["versions"]] == [[0, 1, 2, 3]]
    assert as_data(Report(Evidence(1), ()))["scheduler"]["address"] is None
    assert as_data(Report(Evidence(1), ()))["seconds"] == 0


def alike(number: int, rank: int, **changed: Any) -> Any:
    """Node `number`, like all others but for its name, its UUIDs and its free bytes."""
    made = replace(observed(0, **changed), rank=rank, host=f"h{number}", boot_id=f"b{number}")
    assert made.inventory is not None
    gpus = tuple(replace(each, uuid=f"GPU-{number}-{each.index}") for each in made.inventory.gpus)
    ecc = changed.get("ecc", {each.uuid: 0 for each in gpus})
    made = replace(made, inventory=replace(made.inventory, rank=rank, gpus=gpus), ecc=ecc)
    return made if "scratch" in changed else replace(made, scratch=replace(made.scratch, free=number * GIB))


@pytest.mark.parametrize(("nodes", "blocks"), [(1, 1), (16, 16), (17, 1)])
def test_many_nodes_that_are_alike_share_a_block(nodes: int, blocks: int) -> None:
    found = evidence(*(alike(number, number) for number in range(nodes)))
    lines = render(Report(found, ())).splitlines()
    assert sum(line.startswith(("node h", "17 nodes")) for line in lines) == blocks
    if blocks != nodes:
        head = "17 nodes h[0-16]: ranks 0-16; on each cores 0-1, 64.00 GiB, driver 580.1, scratch /scratch (ext4, 0 B free)"
        assert head in lines
        assert "0    NVIDIA H200  -     141.00 GiB  0-1    -       0    ok" in [
            line.strip() for line in lines
        ]


@pytest.mark.parametrize(
    ("changed", "gpus"),
    [
        ({"driver": "570.2"}, {}),
        ({"gpus": 1}, {}),
        ({"ecc": {}}, {}),
        ({}, {"index": 7}),
        ({}, {"cpus": (2,)}),
    ],
)
def test_a_node_that_differs_has_its_own_block(changed: dict[str, Any], gpus: dict[str, Any]) -> None:
    last = alike(17, 17, **changed)
    of_gpus = tuple(replace(each, **gpus) for each in last.inventory.gpus)
    last = replace(last, inventory=replace(last.inventory, gpus=of_gpus))
    text = render(Report(evidence(*(alike(number, number) for number in range(17)), last), ()))
    assert "17 nodes h[0-16]: ranks 0-16" in text
    assert "node h17: rank 17" in text


def test_nodes_with_different_ranks_have_their_own_blocks() -> None:
    two = [alike(number, 2 * number + more) for number in range(17) for more in (0, 1)]
    text = render(Report(evidence(*two, alike(17, 34)), ()))
    assert "17 nodes h[0-16]: ranks 0-33" in text
    assert "node h17: rank 34" in text  # which is one rank less


@pytest.mark.parametrize("number", [12, 14])
def test_findings_beyond_a_dozen_are_counted(number: int) -> None:
    findings = tuple(Finding("error", "ranks", f"number {one}.", "fix it") for one in range(number))
    text = render(Report(Evidence(1), (*findings, Finding("warning", "ranks", "one more"))))
    assert (text.count("number "), text.count("fix it"), text.count("one more")) == (12, 12, 1)
    assert ("ranks  2 more like these; --json has them all" in text) == (number > 12)
    assert text.count("more like these") == (number > 12)
