"""The rules of `check` about GPUs: their health, how many each node has, and whether ranks see different ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from dask_gpu_mpi.base.hostlist import counted, ranks_text
from dask_gpu_mpi.machine.nvml import INSPECT_COMMAND, RESET_COMMAND
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.sites.slurm import GPUS_ON_NODE

from .observations import Observations
from .report import LEAVE_OUT, Evidence, Finding, problems, split_fix

__all__ = ["check_gpus"]


def check_gpus(evidence: Evidence) -> Iterator[Finding]:
    """NVML, memory errors, drivers, kinds and numbers."""
    drivers: dict[str, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for rank, observed in evidence.observations.items():
        if observed.inventory is None:
            continue
        if observed.driver:
            drivers.setdefault(observed.driver, []).append(rank)
        kinds.setdefault(_kinds(gpu.name for gpu in observed.inventory.gpus), []).append(rank)
    wrong = [
        *problems(evidence, "GPUs", f"correct {VISIBLE_DEVICES}, or leave the node out of the job"),
        *_unhealthy(evidence),
        *_missing(evidence),
    ]
    if len(drivers) > 1:
        wrong.append(
            Finding(
                "warning", "GPUs", f"NVIDIA drivers differ: {_for_ranks(drivers)}",
                "ask the operators for one version, or choose nodes with the same driver",
            )
        )  # fmt: skip
    if len(kinds) > 1:
        wrong.append(
            Finding(
                "warning", "GPUs", f"ranks see GPUs of different number or kind: {_for_ranks(kinds)}",
                "request the same GPUs on every node, unless you want it so",
            )
        )  # fmt: skip
    yield from wrong
    if not wrong:
        driver = f", driver {next(iter(drivers))}" if drivers else ""
        yield Finding("ok", "GPUs", f"{_kinds(gpu.name for gpu in evidence.gpus.values())}{driver}")


def _unhealthy(evidence: Evidence) -> Iterator[Finding]:
    """GPUs that are lost, and those with memory errors, each from the first rank that sees it."""
    seen: set[str] = set()
    for rank, observed in evidence.observations.items():
        if observed.inventory is None:
            continue
        for warning in observed.inventory.warnings:
            yield Finding("error", "GPUs", *split_fix(warning, LEAVE_OUT), (rank,))
        for gpu in observed.inventory.gpus:
            count = (observed.ecc or {}).get(gpu.uuid, 0)
            if count and gpu.uuid not in seen:
                errors = counted(count, "uncorrected memory error")
                found = f"GPU {gpu.index} ({gpu.uuid}) has {errors} since its last reset"
                yield Finding("error", "GPUs", found, f"reset it ({RESET_COMMAND}), or {LEAVE_OUT}", (rank,))
            seen.add(gpu.uuid)


def _missing(evidence: Evidence) -> Iterator[Finding]:
    """Nodes whose ranks together see fewer GPUs than expected.

    NVML that is not installed is no error of its own, since nodes without GPUs are like that: it is one where GPUs are expected.
    """
    if len(evidence.observations) < evidence.size:
        return  # what the silent ranks would see is unknown, and they are red already
    for ranks in evidence.by_host().values():
        expected, source = _expected(evidence, ranks)
        inventories = [observed.inventory for observed in ranks if observed.inventory is not None]
        seen = len({gpu.uuid for inventory in inventories for gpu in inventory.gpus})
        if len(inventories) < len(ranks) or seen >= expected:
            continue
        visible = f"only {counted(seen, 'GPU')}" if seen else "no GPU"
        yield Finding(
            "error", "GPUs", f"{visible} visible on the node (expected {expected}: {source})",
            f"let the ranks of each node see all of its GPUs together ({VISIBLE_DEVICES}, --gpu-bind, --gpus-per-task), or "
            f"{LEAVE_OUT}"
            if seen
            else f"run {INSPECT_COMMAND} on that node (is the driver loaded?); start a container with its GPU option (--nv); "
            f"or {LEAVE_OUT}",
            tuple(observed.rank for observed in ranks),
        )  # fmt: skip


def _expected(evidence: Evidence, ranks: Iterable[Observations]) -> tuple[int, str]:
    """How many GPUs a node should have, and who says so."""
    if evidence.expect_gpus is not None:
        return evidence.expect_gpus, f"--expect-gpus {evidence.expect_gpus}"
    allocated = max(observed.allocated_gpus for observed in ranks)
    return allocated, f"{GPUS_ON_NODE}={allocated}"


def _for_ranks(ranks: Mapping[str, Iterable[int]]) -> str:
    return "; ".join(f"{text} for {ranks_text(of)}" for text, of in ranks.items())


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(sorted(names)).items()) or "no GPU"
