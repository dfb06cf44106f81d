from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.observations import (
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
)
from dask_gpu_mpi.check.report import Listening, Report
from dask_gpu_mpi.check.rules import LONGEST_SCRATCH, NETWORK, judge, split_remedy
from dask_gpu_mpi.check.table import as_data
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.reachability import Reach
from preflights import GIB, GREEN, bad, evidence, facts, gpu, only, reaching


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


# -- launcher, ranks, hosts --------------------------------------------------------------------------------------------


def test_launcher_that_disagrees() -> None:
    problem = (
        "launcher",
        "MPI started a world of 2 ranks although srun launched 3 ranks (SLURM_NTASKS=3). Fix: use srun --mpi=pmix",
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
    lost = "host h2: GPU 2 is left out, NVML can't read it (GPU is lost). Fix: reset it or leave the node out of the job"
    finding = only(evidence(facts(0), replace(base, inventory=replace(base.inventory, warnings=(lost,)))))
    assert (finding.level, finding.remedy) == ("error", "reset it or leave the node out of the job")


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


def test_rank_that_does_not_reach_the_scheduler() -> None:
    finding = only(reaching(r1=Reach("Connection refused")))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("network", "error", (1,), ("h2",))
    assert "rank 0 on h1 at 10.0.0.1:4711: Connection refused" in finding.found


def test_hosts_that_share_no_network() -> None:
    problem = "the nodes share no network: rank 0: none. Fix: name the interface to use with interface (--interface)"
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
    assert split_remedy("a; b. Fix: c; or d", "e") == ("a; b", "c; or d")
