"""The facts of a job for its scheduler: the rows of its plan, and the warnings of its start. Plain data, light to import."""

from __future__ import annotations

from collections.abc import Iterator
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
    return JobFacts(tuple(_rows(plan)), tuple(map(str, plan.warnings)))


def _rows(plan: Plan) -> Iterator[PlannedRow]:
    places = {host.host: {gpu.uuid: place for place, gpu in enumerate(host.gpus)} for host in plan.hosts}
    for worker in plan.workers:
        name, place = str(worker.name), places[worker.host]
        for device in worker.devices:
            yield PlannedRow(name, worker.host, worker.kind, place.get(device), device)
        if not worker.devices:
            yield PlannedRow(name, worker.host, worker.kind)
