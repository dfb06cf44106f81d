"""The evidence of a check, all well or nearly so, and the findings of the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dask_gpu_mpi.check.report import Evidence, Finding, Transfer
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.tasks import DISTRIBUTIONS, NOT_INSTALLED, PYTHON, KernelResult, Observations
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.planner import make_plan

GIB = 2**30
VERSIONS = {
    **dict.fromkeys(DISTRIBUTIONS, NOT_INSTALLED),
    PYTHON: "3.12.9",
    "dask": "2026.7.1",
    "distributed": "2026.7.1",
    "dask-cuda": "26.10.0",
    "cuda-bindings": "13.0.0",
    "bokeh": "3.9.2",
}
#: The lines of a check without a problem, in their order.
GREEN = (
    "launcher", "versions", "known versions", "GPUs", "placement", "start", "kernel", "transport", "network", "clocks", "scratch",
)  # fmt: skip


def gpu(host: str, index: int, **more: Any) -> Gpu:
    uuid = f"GPU-{host}-{index}"
    return Gpu(uuid=uuid, index=index, name="NVIDIA H200", memory=141 * GIB, cpus=(0, 1), **more)


def inventory(rank: int, *, size: int = 2, host: str | None = None, gpus: int = 2, **more: Any) -> Inventory:
    host = host or f"h{rank + 1}"
    seen = tuple(gpu(host, index) for index in range(gpus))
    return replace(Inventory(rank, size, host, host, 1, (0, 1), 64 * GIB, seen, None), **more)


def observed(versions: Mapping[str, str] | None = None, **more: Any) -> Observations:
    scratch = Scratch("/scratch", "ext4", "/", 100 * GIB)
    return replace(Observations(VERSIONS | dict(versions or {}), scratch, "580.1"), **more)


def evidence(
    *inventories: Inventory, ranks: Mapping[int, Observations] | None = None, **more: Any
) -> Evidence:
    """Two hosts where all is well, unless `more` changes it: fields of the evidence, or options; `ranks`: other observations."""
    inventories = inventories or (inventory(0), inventory(1))
    names = {one.name for one in fields(Options)} & more.keys()
    options = Options(**{name: more.pop(name) for name in names})
    plan = make_plan(inventories, replace(options, interface=None))
    workers = plan.workers
    made = Evidence(
        plan=plan,
        options=options,
        address="tls://10.0.0.1:4711",
        dashboard_link="http://localhost:8787/status?token=x",
        transport="TLS, and UCX for GPU memory between workers",
        library="Open MPI v5.0.11",
        ready_seconds=1.25,
        observations={one.rank: observed() for one in inventories} | dict(ranks or {}),
        kernels={uuid: KernelResult(seconds=1.0) for worker in workers for uuid in worker.devices},
        transfers=tuple(
            Transfer(one, other, 10**9, bool(one.devices), 0.5 if one.host == other.host else 2.0)
            for one, other in zip(workers, [*workers[1:], workers[0]], strict=True)
        ),
        clocks={one.rank: 0.01 * one.rank for one in inventories},
    )
    return replace(made, **more)


def bad(found: Evidence) -> list[Finding]:
    """The findings that are not green; whatever is red has a fix."""
    findings = apply_rules(found)
    assert all(finding.fix for finding in findings if finding.level == "error")
    return [finding for finding in findings if finding.level != "ok"]


def only(found: Evidence) -> Finding:
    """The one finding that is not green."""
    findings = bad(found)
    assert len(findings) == 1, findings
    return findings[0]
