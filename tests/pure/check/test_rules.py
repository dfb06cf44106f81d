"""The rules of a preflight: one by one, and all together."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.report import Evidence, Report
from dask_gpu_mpi.check.rules import LEAST_SCRATCH, NETWORK, apply_rules, check_transport
from dask_gpu_mpi.check.run import _tries_of_ucx
from dask_gpu_mpi.check.ucx import UcxErrors
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Protocol, WorkerUcx
from dask_gpu_mpi.startup.messages import Listening
from support.mocks.preflights import GIB, GREEN, bad, evidence, gpu, nodes, observed, only, reaching

FINE = Reach("", 0.0, 0.001)


def green(found: Evidence) -> dict[str, str]:
    """The lines of what is well."""
    return {each.what: each.found for each in apply_rules(found) if each.level == "ok"}


def test_all_is_well() -> None:
    findings = apply_rules(evidence())
    assert tuple(finding.what for finding in findings) == GREEN
    report = Report(evidence(), findings)
    assert (report.level, report.exit_code) == ("ok", 0)
    found = green(evidence())
    assert found["launcher"] == "MPI and launcher agree: 2 ranks on 2 nodes"
    assert found["placement"] == "4 GPU workers, 0 CPU workers"
    assert found["GPUs"] == "4 NVIDIA H200, driver 580.1"
    assert found["kernel"] == "correct result from 4 GPUs, after 1.0 s at most"
    assert green(evidence(observed(0, gpus=0), observed(1, gpus=0)))["GPUs"] == "no GPU"


@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("launcher", "use srun --mpi=pmix"),
        ("GPUs", "mend the driver"),
        ("host", "leave the node out of the job and "),
    ],
)
def test_problems_that_a_rank_has_found_itself(what: str, fix: str) -> None:
    problem = Problem("MPI started 2 ranks, srun 3", fix="" if what == "host" else fix, what=what)
    blind: Any = {} if what == "launcher" else {"inventory": None}
    (finding,) = bad(evidence(observed(0), observed(1, problems=(problem,), **blind)))
    assert (finding.what, finding.level, finding.ranks) == (what, "error", (1,))
    assert finding.found == problem.found
    assert finding.fix.startswith(fix)


def test_silent_rank_is_named_with_its_host() -> None:
    steps = {1: ("h2", "the GPUs (NVML)")}
    found = evidence(observed(0), silent=(1,), steps=steps, size=2, listening=None, kernels={}, reached={})
    finding = next(one for one in bad(found) if one.what == "ranks")
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (1,), ("h2",))
    assert "the GPUs (NVML)" in finding.found
    unheard = next(one for one in bad(replace(found, steps={})) if one.what == "ranks")
    assert unheard.ranks == (1,)
    assert "no response" in unheard.found
    (alone,) = apply_rules(Evidence(1, silent=(0,)))
    assert (alone.what, alone.ranks, alone.hosts) == ("ranks", (0,), ())


def test_warnings_of_the_plan() -> None:
    good = evidence()
    assert good.plan is not None
    of_gpu = Problem("h1: GPU 7 is lost", fix="reset it", what="GPUs")
    lost = replace(good.observations[0].inventory, warnings=(of_gpu,))
    warnings = (of_gpu, Problem("more ranks than GPUs"))
    found = replace(
        good,
        plan=replace(good.plan, warnings=warnings),
        observations={**good.observations, 0: replace(good.observations[0], inventory=lost)},
    )
    assert [(one.what, one.level, one.found, one.fix) for one in bad(found)] == [
        ("GPUs", "error", "h1: GPU 7 is lost", "reset it"),
        ("placement", "warning", "more ranks than GPUs", ""),
    ]


def test_hosts_with_different_gpus_and_drivers() -> None:
    findings = bad(evidence(observed(0), observed(1, gpus=1, driver="570.2")))
    assert [finding.level for finding in findings] == ["warning", "warning"]
    assert "580.1 for rank 0; 570.2 for rank 1" in findings[0].found
    assert "2 NVIDIA H200 for rank 0; 1 NVIDIA H200 for rank 1" in findings[1].found


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
    both = [observed(rank, gpus=seen, allocated_gpus=allocated) for rank in (0, 1)]
    findings = bad(evidence(*both, expect_gpus=expected))
    expected_line = ("GPUs", "error", (0, 1), ("h1", "h2"), says)
    found = [(one.what, one.level, one.ranks, one.hosts, one.found) for one in findings]
    assert found == [expected_line][: bool(says)]


def test_ranks_of_a_host_see_its_gpus_together() -> None:
    whole = observed(0)
    assert whole.inventory is not None
    inventories = [replace(whole.inventory, rank=rank, gpus=(gpu("h1", rank),)) for rank in (0, 1)]
    shares = [replace(whole, rank=each.rank, allocated_gpus=2, inventory=each) for each in inventories]
    assert bad(evidence(*shares)) == []
    finding = only(evidence(*(replace(one, allocated_gpus=3) for one in shares)))
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (0, 1), ("h1",))
    assert finding.found.startswith("only 2 GPUs")
    # what a rank that does not answer would see is not known
    alone = evidence(*(replace(one, allocated_gpus=3) for one in shares), size=3, silent=(2,))
    assert [one.what for one in bad(alone)] == ["ranks"]


def second_rank(one: Observations, **changed: Any) -> Observations:
    """Another rank of the same node."""
    assert one.inventory is not None
    return replace(one, rank=1, **{"inventory": replace(one.inventory, rank=1), **changed})


def test_memory_errors_are_of_the_first_rank_that_sees_the_gpu() -> None:
    one = observed(0, ecc={"GPU-h1-0": 1})
    finding = only(evidence(one, second_rank(one)))
    assert (finding.what, finding.level, finding.ranks) == ("GPUs", "error", (0,))
    assert finding.found == "GPU 0 (GPU-h1-0) has 1 uncorrected memory error since its last reset"
    several = only(evidence(observed(0), observed(1, ecc={"GPU-h2-1": 3})))
    assert several.found.startswith("GPU 1 (GPU-h2-1) has 3 uncorrected memory errors")
    assert bad(evidence(observed(0, ecc=None), observed(1, driver=""))) == []  # what is unknown is not wrong


def test_the_largest_number_of_a_nodes_ranks_is_expected() -> None:
    one = observed(0, allocated_gpus=3)
    finding = only(evidence(one, second_rank(one, allocated_gpus=0)))
    assert finding.ranks == (0, 1)
    assert finding.found == "only 2 GPUs visible on the node (expected 3: SLURM_GPUS_ON_NODE=3)"
    # what a rank that could not look would see is unknown
    blind = second_rank(one, inventory=None, problems=(Problem("NVML failed", what="GPUs"),))
    assert [finding.found for finding in bad(evidence(one, blind))] == ["NVML failed"]


@pytest.mark.parametrize(
    ("kind", "level", "found"),
    [
        ("import", "error", "failed on GPU-h2-1: what was seen"),
        ("late", "error", "failed on GPU-h2-1: what was seen"),
        ("slow", "warning", "not run on GPU-h2-1: what was seen; the file system is probably slow"),
    ],
)
def test_kernel_that_fails(kind: str, level: str, found: str) -> None:
    good = evidence()
    results = (KernelResult("GPU-h2-0", seconds=1.0), KernelResult("GPU-h2-1", kind, "what was seen"))
    finding = only(replace(good, kernels={**good.kernels, 1: results}))
    assert (finding.what, finding.level, finding.ranks, finding.found) == ("kernel", level, (1,), found)
    assert finding.fix


def test_kernel_that_was_not_run() -> None:
    good = evidence()
    without = dict.fromkeys(good.kernels, ())
    problem = Problem("host h1: ranks see overlapping GPUs", fix="use --gpus-per-node")
    findings = bad(replace(good, plan=None, plan_problem=problem, kernels=without))
    assert [(one.what, one.level) for one in findings] == [("placement", "error"), ("kernel", "warning")]
    assert findings[0].fix == "use --gpus-per-node"
    cpus = evidence(observed(0, gpus=0), observed(1, gpus=0))
    findings = [bad(replace(found, kernel=False)) for found in (good, cpus)]
    assert [[(one.what, one.level) for one in each] for each in findings] == [[("kernel", "warning")], []]


def test_failed_kernels_share_a_line() -> None:
    kernels = tuple(KernelResult(uuid, "cuda", "no driver") for uuid in "abcdefghij")
    finding = only(replace(evidence(), kernels={0: kernels[:1], 1: kernels[1:]}))
    assert (finding.ranks, finding.found) == (
        (0, 1),
        "failed on a, b, c, d, e, f, g, h and 2 more: no driver",
    )


def test_rank_that_does_not_reach_the_scheduler() -> None:
    finding = only(replace(reaching(FINE, Reach("Connection refused")), address="fd77::1"))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("network", "error", (1,), ("h2",))
    assert "rank 0 on h1 at [fd77::1]:4711: Connection refused" in finding.found


@pytest.mark.parametrize(
    ("listening", "port", "level", "found", "fix"),
    [
        (Listening(error="in use"), 8786, "error", "in use", "--scheduler-port"),
        (Listening(error="in use"), 0, "error", "in use", "--interface"),
        (Listening(4711, dashboard="in use"), 0, "warning", "127.0.0.1:8787", ""),
        (Listening(4711, dashboard="x", elsewhere=True), 0, "error", "is not on h1", "leave the option out"),
    ],
    ids=["port", "any port", "dashboard", "dashboard elsewhere"],
)
def test_ports_that_can_not_be_listened_at(
    listening: Listening, port: int, level: str, found: str, fix: str
) -> None:
    finding = only(evidence(scheduler_port=port, listening=listening))
    assert (finding.what, finding.level, finding.ranks) == ("ports", level, (0,))
    assert found in finding.found
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("ahead", "protocol", "level"),
    [
        (1.0, "tls", None),
        (1.1, "tls", "warning"),
        (-BACKDATED + 1, "tls", "warning"),
        (-BACKDATED - 1, "tls", "error"),
        (-BACKDATED - 1, "tcp", "warning"),
        (VALID_DAYS * 86400.0, "tls", "warning"),
        (VALID_DAYS * 86400 + 1, "tls", "error"),
    ],
)
def test_clocks(ahead: float, protocol: str, level: str | None) -> None:
    findings = bad(reaching(FINE, Reach("", ahead), protocol=Protocol(protocol)))
    assert [(one.what, one.level, one.ranks) for one in findings] == [("clocks", level, (1,))][: bool(level)]
    for finding in findings:
        way = "ahead of" if ahead > 0 else "behind"
        assert finding.found.startswith(f"the clock is {abs(ahead):.1f} s {way} that of rank 0: ")


def test_green_lines_name_addresses_and_times() -> None:
    found = green(reaching(FINE, Reach("", -0.25, 2.5)))
    assert found["ports"] == "the scheduler can listen at 10.0.0.1, any port"
    reached = "all ranks reach the scheduler's rank 0 on h1 at 10.0.0.1 (round trip 2500.0 ms at most)"
    assert found["network"] == reached
    assert found["clocks"] == "they differ by 0.250 s at most"
    assert green(evidence(scheduler_port=8786))["ports"].endswith(", port 8786")
    assert green(missing())["node pairs"] == "3 pairs of nodes (all) connected in both directions"
    many = "32000 pairs of nodes (a ring and a sample of 499500) connected in both directions"
    assert green(evidence(nodes=nodes(1000)))["node pairs"] == many
    assert "node pairs" not in green(evidence(nodes=nodes(2), reached={}))


def test_what_was_not_tested_is_not_reported() -> None:
    good = evidence()
    green = {finding.what for finding in apply_rules(replace(good, reached={}))}
    assert not green & {"network", "clocks"}
    assert {finding.what for finding in apply_rules(replace(good, listening=None))} >= {"clocks"}
    silent = apply_rules(replace(good, listening=Listening(error="no response"), reached={}))
    assert [one.what for one in silent if one.what in ("ports", "network", "clocks")] == ["ports"]


BEHIND = Reach("", -BACKDATED - 0.5)


@pytest.mark.parametrize(
    ("first", "second", "scheduler", "expected"),
    [
        (
            Reach("", -BACKDATED),
            Reach("", -2.0 * BACKDATED - 0.1),
            0,
            ["warning: behind 0", "error: behind 0"],
        ),
        (Reach("", 2.0 * BACKDATED), Reach("", 0.01), 1, ["warning: ahead of 1", "error: behind 0"]),
        (FINE, Reach("refused"), 0, []),
        (Reach("refused"), BEHIND, 0, ["error: behind 0"]),
    ],
    ids=["both", "rank 0 dates certificates", "unknown is right", "rank 0 is unknown"],
)
def test_clocks_are_compared(first: Reach, second: Reach, scheduler: int, expected: list[str]) -> None:
    found = [one for one in bad(reaching(first, second, scheduler_rank=scheduler)) if one.what == "clocks"]
    sides = [re.sub(r".* s (.*) that of rank (\d):.*", r"\1 \2", one.found) for one in found]
    assert [f"{one.level}: {side}" for one, side in zip(found, sides, strict=True)] == expected


SILENT = "no answer within 5 s"


def missing(**lost: dict[str, list[str]]) -> Evidence:
    """Three hosts, of which some do not reach others."""
    found = [observed(rank) for rank in range(3)]
    good = evidence(*found, nodes=nodes(3))
    reached = {rank: replace(each, lost=lost.get(f"r{rank}", ())) for rank, each in good.reached.items()}
    return replace(good, reached=reached)


def test_a_node_that_nobody_reaches_has_one_line() -> None:
    gone = {SILENT: ["h3"]}
    findings = bad(missing(r0=gone, r1=gone, r2={SILENT: ["h1"], "refused": ["h2"]}))
    assert {(one.what, one.level) for one in findings} == {("node pairs", "error")}
    assert [(one.ranks, one.found.partition(";")[0]) for one in findings] == [
        ((0, 1), f"can't reach h3: {SILENT}"),
        ((2,), f"can't reach h1: {SILENT}"),
        ((2,), "can't reach h2: refused"),
    ]


def test_a_node_on_which_workers_can_not_listen() -> None:
    first, second = nodes(2)
    finding = only(evidence(nodes=(first, replace(second, port=0))))
    assert (finding.what, finding.level, finding.ranks) == ("node pairs", "warning", (1,))
    assert second.address in finding.found


@pytest.mark.parametrize(
    ("scratch", "level", "says"),
    [
        (Scratch("/s", "", "", -1), None, ""),
        (Scratch("/s", "ext4", "/", 1000), "error", "has only 1000 B free"),
        (Scratch("/s", "ext4", "/", 100 * GIB, error="Permission denied"), "error", "can't be written (Permission denied)"),
        (Scratch("/s", "ext4", "/", 100 * GIB, ignored="/t"), "warning", "TMPDIR=/t"),
        (Scratch("/s", "ext4", "/", 100 * GIB, exposed="/s"), "warning", "may replace the workers' files in '/s'"),
        (Scratch("/s", "tmpfs", "/s", 1 * GIB), "warning", "is memory"),
        *((Scratch("/s", kind, "/s", 100 * GIB), "warning", f"is on {NETWORK[kind]} (/s)") for kind in ("nfs4", "gpfs")),
        # free space at the bounds
        (Scratch("/s", "ext4", "/", LEAST_SCRATCH), "warning", ""),
        (Scratch("/s", "ext4", "/", 64 * GIB - 1), "warning", "about 64 of 64 GiB"),
        (Scratch("/s", "ext4", "/", 64 * GIB), None, ""),
    ],
)  # fmt: skip
def test_scratch(scratch: Scratch, level: str | None, says: str) -> None:
    findings = bad(evidence(observed(0), observed(1, scratch=scratch)))
    assert [(one.what, one.level, one.ranks) for one in findings] == [("scratch", level, (1,))][: bool(level)]
    assert all(says in finding.found for finding in findings)


@pytest.mark.parametrize(
    ("paths", "named"),
    [("aaa", "/a"), ("aba", "/a, /b"), ("abcdefghi", "/a, /b, /c, /d, /e, /f, /g, /h and 1 more")],
)
def test_green_line_names_eight_directories(paths: str, named: str) -> None:
    ranks = [
        observed(rank, scratch=Scratch(f"/{path}", "ext4", "/", (200 - rank) * GIB), inventory=None)
        for rank, path in enumerate(paths)
    ]
    found = {one.what: one.found for one in apply_rules(evidence(*ranks))}
    assert found["scratch"] == f"{named}: local, writable, {201 - len(paths)}.00 GiB free at least"
    unknown = observed(0, scratch=Scratch("/s"))
    assert "/s: local, writable, 0 B free at least" in {one.found for one in apply_rules(evidence(unknown))}


NO_PACKAGE = Problem("distributed-ucxx is not installed", fix="pip install it")


def two_nodes(
    wanted: WorkerUcx, *, gpus: bool = True, without: Problem | None = None, **more: Any
) -> Evidence:
    found = [observed(0, gpus=int(gpus)), observed(1, gpus=int(gpus), ucx=UcxAbility(without))]
    return evidence(*found, worker_ucx=wanted, **more)


def test_nothing_is_said_where_ucx_is_not_wanted() -> None:
    for found in (
        two_nodes(WorkerUcx.OFF),
        two_nodes(WorkerUcx.AUTO, gpus=False, without=NO_PACKAGE),
        replace(two_nodes(WorkerUcx.AUTO), plan=None),
    ):
        assert [*check_transport(found)] == []


@pytest.mark.parametrize(
    ("results", "level", "ranks", "text", "fix"),
    [
        (({}, {}), "ok", (), "UCX works within 2 nodes and from each to the next", ""),
        (({}, {"": "no device"}), "warning", (1,), "no device", ""),
        (({"h2": "nothing came"}, {}), "warning", (0,), "UCX does not work to h2: nothing came", "ports"),
    ],
    ids=["works", "not on one node", "not between nodes"],
)
def test_ucx_that_was_tried(
    results: tuple[UcxErrors, ...], level: str, ranks: tuple[int, ...], text: str, fix: str
) -> None:
    (finding,) = check_transport(two_nodes(WorkerUcx.AUTO, ucx=dict(enumerate(results))))
    assert (finding.level, finding.ranks) == (level, ranks)
    assert text in finding.found
    assert fix in finding.fix


@pytest.mark.parametrize(("ucx", "level"), [(WorkerUcx.AUTO, "warning"), (WorkerUcx.ALL, "error")])
def test_a_package_that_is_missing(ucx: WorkerUcx, level: str) -> None:
    (finding,) = check_transport(two_nodes(ucx, without=NO_PACKAGE))
    assert (finding.level, finding.fix) == (level, "pip install it")
    assert "distributed-ucxx is not installed" in finding.found


def test_one_rank_of_each_node_tries() -> None:
    assert _tries_of_ucx(two_nodes(WorkerUcx.OFF)) == ({}, False)
    found = two_nodes(WorkerUcx.AUTO)
    devices = {worker.rank: worker.device for worker in found.plan.workers}  # type: ignore[union-attr]
    assert _tries_of_ucx(found) == (devices, True)
    assert _tries_of_ucx(two_nodes(WorkerUcx.AUTO, without=NO_PACKAGE)) == ({}, False)  # nobody will use it
    assert _tries_of_ucx(two_nodes(WorkerUcx.ALL, gpus=False)) == ({0: "", 1: ""}, True)
    assert _tries_of_ucx(two_nodes(WorkerUcx.AUTO, gpus=False)) == ({}, False)
