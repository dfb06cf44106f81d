"""The rules of a check: one by one, and all together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.check.report import Evidence, Report
from dask_gpu_mpi.check.rules import KNOWN_BAD, LEAST_SCRATCH, apply_rules, known_bad
from dask_gpu_mpi.check.tasks import NOT_INSTALLED, PYTHON, KernelResult
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine import Promise
from dask_gpu_mpi.machine.scratch import Scratch
from support.mocks.preflights import GIB, GREEN, VERSIONS, bad, evidence, gpu, inventory, observed, only

CPUS = (inventory(0, gpus=0), inventory(1, gpus=0))


def green(found: Evidence) -> dict[str, str]:
    """The lines without a problem."""
    return {each.what: each.found for each in apply_rules(found) if each.level == "ok"}


def test_all_is_well() -> None:
    findings = apply_rules(evidence())
    assert tuple(finding.what for finding in findings) == GREEN
    report = Report(findings, evidence())
    assert (report.level, report.exit_code) == ("ok", 0)
    assert green(evidence()) == {
        "launcher": "2 ranks on 2 nodes have met by Open MPI v5.0.11",
        "versions": "Python 3.12.9, distributed 2026.7.1, dask-cuda 26.10.0; all versions are the same on all ranks",
        "known versions": "no version that is known to be bad",
        "GPUs": "4 NVIDIA H200, driver 580.1",
        "placement": "4 GPU workers, 0 CPU workers",
        "start": "4 workers ready after 1.2 s",
        "kernel": "correct result from 4 GPUs, after 1.0 s at most",
        "transport": "TLS, and UCX for GPU memory between workers; within nodes 2 GB/s (GPU memory, 2 transfers at the same "
        "time); between nodes 0.5 GB/s (GPU memory, 2 transfers at the same time)",
        "network": "all workers have reached the scheduler on rank 0 on h1 at tls://10.0.0.1:4711",
        "clocks": "they differ by 0.010 s at most",
        "scratch": "/scratch: local, writable, 100.00 GiB free at least",
    }


def test_without_gpus_there_is_no_kernel() -> None:
    found = green(evidence(*CPUS, transport="", library=""))
    assert tuple(found) == tuple(name for name in GREEN if name != "kernel")
    assert found["GPUs"] == "no GPU, driver 580.1"
    assert found["launcher"] == "2 ranks on 2 nodes have met"
    assert found["transport"] == "between nodes 0.5 GB/s (host memory, 2 transfers at the same time)"


def test_one_worker_has_nothing_to_transfer() -> None:
    assert "transport" not in green(evidence(inventory(0, size=1, gpus=1), transport="", transfers=()))


def test_a_worker_that_does_not_inspect_its_node() -> None:
    good = evidence()
    finding = only(replace(good, observations={0: observed()}, silent={1: "no result within 10 s"}))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("ranks", "error", (1,), ("h2",))
    assert finding.found.endswith("local directory: no result within 10 s")
    nothing: dict[str, Any] = {"observations": {}, "clocks": {}, "kernels": {}, "transfers": ()}
    silent = replace(good, **nothing, silent=dict.fromkeys((0, 1), "late"))
    assert [(one.what, one.ranks) for one in bad(silent)] == [("ranks", (0, 1))]
    assert not green(silent).keys() & {"versions", "scratch", "clocks", "kernel"}


def test_warnings_of_the_start() -> None:
    good = evidence(start_warnings=("more ranks than GPUs", "it is open. Fix: close it", "x"))
    lost = Problem("h1: GPU 7 is lost", fix="reset it", what="GPUs")
    exposed = Problem("everyone may write", what="scratch")
    found = replace(good, plan=replace(good.plan, warnings=(lost, Problem("more ranks than GPUs"), exposed)))
    assert [(one.what, one.level, one.found, one.fix) for one in bad(found)] == [
        ("GPUs", "error", "h1: GPU 7 is lost", "reset it"),
        ("placement", "warning", "more ranks than GPUs", ""),
        ("scratch", "warning", "everyone may write", ""),
        ("start", "warning", "it is open", "close it"),
        ("start", "warning", "x", ""),
    ]


def test_hosts_with_different_gpus_and_drivers() -> None:
    found = evidence(inventory(0), inventory(1, gpus=1), ranks={1: observed(driver="570.2")})
    assert [(one.level, one.found) for one in bad(found)] == [
        ("warning", "NVIDIA drivers differ: 580.1 on h1; 570.2 on h2"),
        ("warning", "nodes have GPUs of different number or kind: 2 NVIDIA H200 on h1; 1 NVIDIA H200 on h2"),
    ]


@pytest.mark.parametrize(
    ("seen", "allocated", "expected", "says"),
    [
        (2, 2, None, ""),
        (0, 0, None, ""),
        (2, 4, 2, ""),  # what the user expects counts
        (0, 4, None, "no GPU visible on the node (expected 4: SLURM_GPUS_ON_NODE=4)"),
        (0, 0, 4, "no GPU visible on the node (expected 4: --expect-gpus 4)"),
        (3, 0, 4, "only 3 GPUs visible on the node (expected 4: --expect-gpus 4)"),
    ],
)
def test_gpus_that_are_gone(seen: int, allocated: int, expected: int | None, says: str) -> None:
    both = [
        inventory(rank, gpus=seen, promise=Promise(allocated, f"SLURM_GPUS_ON_NODE={allocated}", "look"))
        for rank in (0, 1)
    ]
    findings = bad(evidence(*both, expect_gpus=expected))
    found = [(one.what, one.level, one.ranks, one.hosts, one.found) for one in findings]
    assert found == [("GPUs", "error", (0, 1), ("h1", "h2"), says)] * bool(says)
    by_variable = bad(evidence(*both, expect_gpus=expected, expected_by="DGM_EXPECT_GPUS=4"))
    assert [one.found for one in by_variable] == [
        says.replace("--expect-gpus 4", "DGM_EXPECT_GPUS=4")
    ] * bool(says)
    cpu = evidence(*both, expect_gpus=expected, worker_class="distributed.Nanny")
    assert bad(cpu) == []  # nobody looks for GPUs


def test_ranks_of_a_host_see_its_gpus_together() -> None:
    shares = [inventory(rank, host="h1", gpus=0, promise=Promise(2 * rank)) for rank in (0, 1)]
    shares = [replace(one, gpus=(gpu("h1", one.rank),)) for one in shares]
    assert bad(evidence(*shares)) == []
    finding = only(evidence(*shares, expect_gpus=3))
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (0, 1), ("h1",))
    assert finding.found.startswith("only 2 GPUs")


def test_memory_errors() -> None:
    one = only(evidence(ranks={0: observed(ecc={"GPU-h1-0": 1, "GPU-h1-1": 0})}))
    assert (one.what, one.level, one.ranks) == ("GPUs", "error", (0,))
    assert one.found == "GPU 0 (GPU-h1-0) has 1 uncorrected memory error since its last reset"
    several = only(evidence(ranks={1: observed(ecc={"GPU-h2-1": 3})}))
    assert several.found.startswith("GPU 1 (GPU-h2-1) has 3 uncorrected memory errors")
    assert bad(evidence(ranks={1: observed(driver="")})) == []  # what is unknown is not wrong


@pytest.mark.parametrize(
    ("kind", "level", "how"),
    [
        *((kind, "error", "failed") for kind in ("cuda", "wrong", "late", "died")),
        *((kind, "warning", "not run") for kind in ("import", "slow")),
    ],
)
def test_kernel_that_fails(kind: str, level: str, how: str) -> None:
    good = evidence()
    finding = only(replace(good, kernels={**good.kernels, "GPU-h2-1": KernelResult(kind, "the error")}))
    assert (finding.what, finding.level, finding.ranks) == ("kernel", level, (1,))
    assert finding.found == f"{how} on GPU-h2-1: the error"
    assert finding.fix


def test_failed_kernels_share_a_line() -> None:
    good = evidence(inventory(0, gpus=5), inventory(1, gpus=5))
    finding = only(replace(good, kernels=dict.fromkeys(good.kernels, KernelResult("cuda", "no driver"))))
    assert finding.ranks == (0, 1)
    assert finding.found.startswith("failed on GPU-h1-0, GPU-h1-1, ")
    assert finding.found.endswith(" and 2 more: no driver")


def test_kernel_that_was_not_run() -> None:
    found = [bad(replace(one, kernel=False, kernels={})) for one in (evidence(), evidence(*CPUS))]
    assert [[(one.what, one.level) for one in each] for each in found] == [[("kernel", "warning")], []]


NO_UCX = (
    "TLS; GPU data goes through host memory. No UCX: distributed-ucxx is not installed. Fix: pip install it"
)


@pytest.mark.parametrize(
    ("changed", "ranks", "text", "fix"),
    [
        ({"transport": NO_UCX}, (), "No UCX: distributed-ucxx is not installed", "pip install it"),
        (
            {"without_ucx": {1: {"10.0.0.1": "no data"}}},
            (1,),
            "not work with 10.0.0.1: no data; ",
            "TCP ports",
        ),
    ],
)
def test_data_that_goes_over_tls(
    changed: dict[str, Any], ranks: tuple[int, ...], text: str, fix: str
) -> None:
    finding = only(evidence(**changed))
    assert (finding.what, finding.level, finding.ranks) == ("transport", "warning", ranks)
    assert text in finding.found
    assert fix in finding.fix
    assert "within nodes 2 GB/s" in green(evidence(**changed))["transport"]


def test_transfers_that_fail() -> None:
    good = evidence()
    first, *others = good.transfers
    finding = only(replace(good, transfers=(replace(first, error="no data within 12 s"), *others)))
    assert (finding.what, finding.level, finding.ranks) == ("transport", "error", (0,))
    assert finding.found == "could not receive data of worker 0-0 on h1: no data within 12 s"
    mixed = replace(good, transfers=(replace(first, on_device=False, seconds=0.25), *others))
    assert "within nodes 2 to 4 GB/s (host and GPU memory, 2 transfers" in green(mixed)["transport"]
    unknown = tuple(replace(one, seconds=None) for one in good.transfers)
    assert "transport" not in green(replace(good, transport="", transfers=unknown))


@pytest.mark.parametrize(
    ("link", "wanted", "says"),
    [
        ("http://localhost:8787/status", ":8787", ""),
        ("http://localhost:40001/status", "127.0.0.1:8787", "can't listen at 127.0.0.1:8787, and uses port 40001"),
        ("http://localhost:40001/status", "127.0.0.1:0", ""),
        (None, "127.0.0.1:8787", ""),
    ],
)  # fmt: skip
def test_the_dashboards_port(link: str | None, wanted: str, says: str) -> None:
    findings = bad(evidence(dashboard_link=link, dashboard_address=wanted))
    found = [(one.what, one.level, one.ranks, one.found) for one in findings]
    assert found == [("ports", "warning", (0,), f"the dashboard {says}")] * bool(says)


def test_the_cluster_of_another_job() -> None:
    link = "http://localhost:1/status"
    found = evidence(dashboard_link=link, scheduler=False, scheduler_address="10.0.0.9:1")
    assert bad(found) == []
    assert "the scheduler of another job at " in green(found)["network"]


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (1.0, ""),
        (-1.0, ""),
        (1.1, "the clock is 1.1 s ahead of that of rank 0: "),
        (-9.0, "the clock is 9.0 s behind that"),
    ],
)
def test_clocks(ahead: float, says: str) -> None:
    found = evidence(clocks={0: 0.0, 1: ahead})
    findings = bad(found)
    assert [(one.what, one.level, one.ranks) for one in findings] == [("clocks", "warning", (1,))] * bool(
        says
    )
    assert all(one.found.startswith(says) for one in findings)
    assert ("clocks" in green(found)) is not bool(says)


@pytest.mark.parametrize(
    ("scratch", "level", "says"),
    [
        (Scratch("/s", "", "", -1), None, ""),
        (Scratch("/s", "ext4", "/", 1000), "error", "has only 1000 B free"),
        (Scratch("/s", "ext4", "/", 100 * GIB, error="Permission denied"), "error", "can't be written (Permission denied)"),
        (Scratch("/s", "ext4", "/", 100 * GIB, ignored="/t"), "warning", "TMPDIR=/t"),
        (Scratch("/s", "tmpfs", "/s", 1 * GIB), "warning", "is memory"),
        (Scratch("/s", "tmpfs", "/s", LEAST_SCRATCH - 1), "error", "MiB free"),
        *((Scratch("/s", kind, "/s", 100 * GIB), "warning", f"is on {kind} (/s)") for kind in ("nfs4", "gpfs")),
        # free space at the bounds
        (Scratch("/s", "ext4", "/", LEAST_SCRATCH), "warning", ""),
        (Scratch("/s", "ext4", "/", 64 * GIB - 1), "warning", "about 64 of 64 GiB"),
        (Scratch("/s", "ext4", "/", 64 * GIB), None, ""),
    ],
)  # fmt: skip
def test_scratch(scratch: Scratch, level: str | None, says: str) -> None:
    findings = bad(evidence(ranks={1: observed(scratch=scratch)}))
    assert [(one.what, one.level, one.ranks) for one in findings] == [("scratch", level, (1,))][: bool(level)]
    assert all(says in finding.found for finding in findings)


def test_directories_that_differ_are_listed() -> None:
    ranks = {rank: observed(scratch=Scratch(f"/{rank}", "ext4", "/", (200 - rank) * GIB)) for rank in (0, 1)}
    assert green(evidence(ranks=ranks))["scratch"] == "/0, /1: local, writable, 199.00 GiB free at least"
    assert observed().versions == VERSIONS


@pytest.mark.parametrize(
    ("name", "other", "level"),
    [
        ("dask-cuda", NOT_INSTALLED, "error"),
        (PYTHON, "3.13.1", "error"),
        (PYTHON, "3.12.8", "warning"),
        ("numpy", "2.0", "warning"),
    ],
)
def test_versions_that_differ(name: str, other: str, level: str) -> None:
    two = observed({name: other, "tornado": "6.9"})
    versions = [one for one in bad(evidence(ranks={1: two})) if one.what == "versions"]
    findings = {one.found.partition(" ")[0]: one for one in versions}
    assert findings.keys() == {name.partition(" ")[0], "tornado"}
    finding = findings[name.partition(" ")[0]]
    assert finding.level == level
    assert finding.found.startswith(f"{name} differs")
    assert f"{other} for rank 1 on h2" in finding.found


def test_known_issues_have_their_ranks() -> None:
    ranks = dict.fromkeys((0, 1), observed({"dask-cuda": NOT_INSTALLED}))
    found = [one for one in bad(evidence(ranks=ranks)) if one.what == "known versions"]
    assert [(one.level, one.ranks) for one in found] == [("error", (0, 1))]
    assert "known versions" not in {one.what for one in bad(evidence(*CPUS, ranks=ranks))}


@pytest.mark.parametrize(
    ("versions", "gpus", "level", "says"),
    [
        ({"bokeh": "3.10.2", "distributed": "2026.7.1"}, False, "warning", "bokeh 3.10.2 with distributed 2026.7.1"),
        ({PYTHON: "3.12.2"}, False, "warning", "Python 3.12.2"),
        ({PYTHON: "3.14.0"}, False, "warning", "Python 3.14.0"),
        ({"cuda-bindings": NOT_INSTALLED}, True, "error", "dask-cuda 26.10.0 with no cuda-bindings"),
        ({"libucx-cu13": "1.22.0"}, False, "warning", "libucx-cu13 1.22.0"),
        ({"bokeh": "3.9.2"}, False, None, ""),
        ({"bokeh": "3.10.2", "distributed": "2026.8.0"}, False, None, ""),
        ({"bokeh": "unreadable"}, False, None, ""),
        ({PYTHON: "3.12.3"}, False, None, ""),
        ({PYTHON: "3.11.7", "libucx-cu13": "1.21.0", "cuda-bindings": NOT_INSTALLED}, False, None, ""),
    ],
)  # fmt: skip
def test_known_bad(versions: dict[str, str], gpus: bool, level: str | None, says: str) -> None:
    all_versions = VERSIONS | versions
    found = [*known_bad(all_versions, gpus=gpus)]
    assert [one.level for one in found] == ([] if level is None else [level])
    assert all(one.found.startswith(f"{says}: ") for one in found)
    assert {name for one in KNOWN_BAD for name in one.wanted} <= VERSIONS.keys()
