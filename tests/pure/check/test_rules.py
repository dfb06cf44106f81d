"""The rules of a preflight about ranks and their plan, and all rules together."""

from __future__ import annotations

from dataclasses import replace

from dask_gpu_mpi.check.report import Evidence, Report
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.errors import Problem
from support.mocks.preflights import GIB, GREEN, bad, evidence, gpu, observed, only


def test_all_is_well() -> None:
    findings = apply_rules(evidence())
    assert tuple(finding.what for finding in findings) == GREEN
    assert {finding.level for finding in findings} == {"ok"}
    report = Report(evidence(), findings)
    assert (report.level, report.exit_code) == ("ok", 0)


def test_launcher_that_disagrees() -> None:
    problem = Problem(
        "MPI started a world of 2 ranks although srun launched 3 ranks (SLURM_NTASKS=3)",
        fix="use srun --mpi=pmix",
        what="launcher",
    )
    finding = only(evidence(observed(0), observed(1, problems=(problem,))))
    assert (finding.what, finding.level, finding.ranks) == ("launcher", "error", (1,))
    assert finding.fix == "use srun --mpi=pmix"


def test_silent_rank_is_named_with_its_host() -> None:
    found = evidence(
        observed(0), silent=(1,), steps={1: ("h2", "the GPUs (NVML)")}, size=2, listening=None, tests={}
    )
    finding = next(one for one in bad(found) if one.what == "ranks")
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (1,), ("h2",))
    assert "the GPUs (NVML)" in finding.found
    unheard = next(one for one in bad(replace(found, steps={})) if one.what == "ranks")
    assert unheard.ranks == (1,)
    assert "no response" in unheard.found


def test_busy_gpu() -> None:
    base = observed(1)
    assert base.inventory is not None
    gpus = (gpu("h2", 0, processes=((999, 5 * GIB),)), gpu("h2", 1))
    finding = only(evidence(observed(0), replace(base, inventory=replace(base.inventory, gpus=gpus))))
    assert (finding.what, finding.level) == ("placement", "warning")
    assert "GPU-h2-0" in finding.found
    assert "5.00 GiB" in finding.found


def test_green_lines_count_ranks_nodes_and_workers() -> None:
    found = {finding.what: finding.found for finding in apply_rules(evidence())}
    assert found["launcher"] == "MPI and launcher agree: 2 ranks on 2 nodes"
    assert found["placement"] == "4 GPU workers, 0 CPU workers"


def test_a_silent_job_has_one_finding() -> None:
    (finding,) = apply_rules(Evidence(1, silent=(0,)))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("ranks", "error", (0,), ())


def test_node_that_could_not_be_inspected() -> None:
    problem = Problem("could not inspect this node (OSError: no /proc)", what="host")
    both = [observed(rank, inventory=None, problems=(problem,)) for rank in (0, 1)]
    finding = only(evidence(*both))
    assert (finding.what, finding.level, finding.ranks) == ("host", "error", (0, 1))
    assert (finding.found, finding.fix) == (
        problem.found,
        "leave the node out of the job and inform the operators of the cluster",
    )


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
