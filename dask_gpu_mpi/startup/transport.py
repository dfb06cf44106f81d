"""What the workers of a job send each other over UCX, once there is a plan: a pure function."""

from __future__ import annotations

from collections.abc import Mapping

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.network.ucx import missing_ucx
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.plan.plan import Plan

__all__ = ["choose_ucx", "obstacle"]


def obstacle(options: Options) -> str:
    """Why the workers of this rank can't use UCX beside TLS; empty: they can, or need not."""
    if options.worker_ucx is WorkerUcx.OFF:
        return ""
    if (
        options.worker_ucx is WorkerUcx.AUTO
        and options.worker_class != "auto"
        and options.worker_kind != "gpu"
    ):
        return "worker_class is not dask_cuda.CUDAWorker"
    return missing_ucx(device_memory=options.worker_ucx is WorkerUcx.AUTO)


def choose_ucx(wanted: WorkerUcx, plan: Plan, obstacles: Mapping[int, str]) -> tuple[WorkerUcx, str]:
    """What goes over UCX, and the line that says so and why.

    Parameters
    ----------
    wanted : WorkerUcx
        What the user asked for.
    plan : Plan
        Of the job.
    obstacles : mapping
        By rank: why its workers can't use UCX; empty texts count as none.

    Returns
    -------
    tuple
        `WorkerUcx`, and a text without a full stop; empty where there is nothing to exchange, or no GPU.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return WorkerUcx.OFF, ""
    if wanted is WorkerUcx.ALL:
        return wanted, "TLS, and UCX for large data between workers (authenticated, not encrypted)"
    reason = ""
    if without := sorted(working - with_gpus):
        reason = f"{ranks_text(without)} without a GPU"
    else:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(working):
            if text := obstacles.get(rank, ""):
                ranks_of.setdefault(text, []).append(rank)
        for text, ranks in ranks_of.items():
            reason = text if len(ranks) == len(working) else f"{ranks_text(ranks)}: {text}"
            break
    alone = len(plan.workers) == 1
    if reason:
        return (
            WorkerUcx.OFF,
            "" if alone else f"TLS, which GPU data takes by way of host memory; no UCX: {reason}",
        )
    line = "TLS, and UCX for GPU memory between workers (authenticated, not encrypted)"
    return WorkerUcx.AUTO, "" if alone else line
