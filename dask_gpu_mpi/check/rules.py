"""From what all ranks observed to what is right and wrong with the job: pure functions, for `check`.

Here are the rules about ranks and their plan; each of the others has a module of its own, ``*_rules``.
"""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.hostlist import counted
from dask_gpu_mpi.machine.nvml import INSPECT_COMMAND

from .gpu_rules import check_gpus
from .kernel_rules import check_kernels
from .network_rules import check_clocks, check_network, check_node_pairs, check_ports
from .report import LEAVE_OUT, Evidence, Finding, merge, problems, split_fix
from .scratch_rules import check_scratch
from .transport_rules import check_transport
from .version_rules import check_known_issues, check_versions

__all__ = ["apply_rules"]


def apply_rules(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, in the order of the report; at least one for each thing that was inspected."""
    found = [*check_ranks(evidence)]
    if evidence.observations:
        for rule in (
            check_versions, check_known_issues, check_gpus, check_placement, check_kernels, check_transport,
            check_ports, check_network, check_node_pairs, check_clocks, check_scratch,
        ):  # fmt: skip
            found += rule(evidence)
    return merge(evidence, found)


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Launcher and MPI, the ranks that respond, and whether these could inspect their nodes."""
    wrong = [*problems(evidence, "launcher", "use the mpirun of the MPI library that mpi4py loads")]
    yield from wrong
    if not wrong and not evidence.silent:
        nodes = counted(len(evidence.by_host()), "node")
        yield Finding(
            "ok", "launcher", f"MPI and launcher agree: {counted(evidence.size, 'rank')} on {nodes}"
        )
    for rank in evidence.silent:
        if rank in evidence.steps:
            found = f"no response; last step: {evidence.steps[rank][1]}"
        else:
            found = "no response; the rank may be stopped or swapped out, or its node is down"
        yield Finding(
            "error", "ranks", found, f"inspect that node ({INSPECT_COMMAND}, df); {LEAVE_OUT}", (rank,)
        )
    yield from problems(evidence, "host", LEAVE_OUT)


def check_placement(evidence: Evidence) -> Iterator[Finding]:
    """The plan and its warnings."""
    if evidence.plan_problem:
        yield Finding("error", "placement", *split_fix(evidence.plan_problem, "correct the options"))
    elif evidence.plan is not None:
        of_gpus = {warning for inventory in evidence.inventories for warning in inventory.warnings}
        for warning in evidence.plan.warnings:
            if warning not in of_gpus:  # the GPUs' own lines have these
                yield Finding("warning", "placement", *split_fix(warning, ""))
        kinds = [worker.kind for worker in evidence.plan.workers]
        workers = [counted(kinds.count(kind), f"{kind.upper()} worker") for kind in ("gpu", "cpu")]
        yield Finding("ok", "placement", ", ".join(workers))
