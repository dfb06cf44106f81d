"""The facts of a job for its scheduler: the rows of its plan, and the warnings of its start. Plain data, light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_gpu_mpi.plan.model import Plan


@dataclass(frozen=True)
class PlannedRow:
    """A GPU with its worker; or a worker without one."""

    #: Name of the worker, as text.
    worker: str
    #: Name of the node, as in the plan.
    host: str
    #: ``"gpu"`` or ``"cpu"``.
    kind: str
    #: Place of the GPU among those of its node.
    gpu_index: int | None = None
    #: UUID of the GPU.
    device: str | None = None


@dataclass(frozen=True)
class JobFacts:
    """The facts of a job that are known when its scheduler starts."""

    rows: tuple[PlannedRow, ...] = ()
    #: Of the plan, one line each.
    warnings: tuple[str, ...] = ()


def facts_of(plan: Plan) -> JobFacts:
    """The facts of a job with this plan."""
    places = {(host.host, gpu.uuid): place for host in plan.hosts for place, gpu in enumerate(host.gpus)}
    rows = [
        PlannedRow(
            str(worker.name), worker.host, worker.kind, places.get((worker.host, device or "")), device
        )
        for worker in plan.workers
        for device in worker.devices or (None,)
    ]
    return JobFacts(tuple(rows), tuple(map(str, plan.warnings)))
