"""What the workers of a job send each other over UCX, once there is a plan: a pure function."""

from __future__ import annotations

from collections.abc import Mapping

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.ucx import missing_ucx
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.plan.plan import Plan

__all__ = ["choose_ucx", "obstacle", "probing_workers"]


def obstacle(options: Options, *, gpus: bool) -> str:
    """Why the workers of this rank can't use UCX beside TLS; empty: they can, or need not.

    Parameters
    ----------
    options : Options
        What the user asked for.
    gpus : bool
        Whether this rank sees GPUs.
    """
    wanted = options.worker_ucx
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not gpus):
        return ""
    if str(options.worker_class).rpartition(".")[2] == "Worker":
        return "workers of the class distributed.Worker run in the agent. Fix: worker_class (--worker-class) distributed.Nanny"
    if wanted is WorkerUcx.AUTO and options.worker_class != "auto" and options.worker_kind != "gpu":
        return "worker_class is not dask_cuda.CUDAWorker. Fix: leave it out, or choose --protocol tls"
    return missing_ucx(device_memory=gpus)


def choose_ucx(
    wanted: WorkerUcx, plan: Plan, obstacles: Mapping[int, str], *, attaches: bool = False
) -> tuple[WorkerUcx, str]:
    """What goes over UCX, and the line that says so and why.

    Parameters
    ----------
    wanted : WorkerUcx
        What the user asked for.
    plan : Plan
        Of the job.
    obstacles : mapping
        By rank: why its workers can't use UCX; empty texts count as none.
    attaches : bool
        Whether the workers are added to those of a running cluster.

    Returns
    -------
    tuple
        `WorkerUcx`, and a text without a full stop; empty where there is nothing to exchange, or no GPU.

    Raises
    ------
    InputError
        The user asked for UCX, and a rank can't use it.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return WorkerUcx.OFF, ""
    reason = _reason(working, obstacles)
    if wanted is WorkerUcx.ALL and reason:
        raise InputError(f"protocol 'ucx': {reason}")
    if len(plan.workers) == 1 and not attaches:
        return WorkerUcx.OFF, ""
    if wanted is WorkerUcx.ALL:
        return wanted, "TLS, and UCX for large data between workers (authenticated, not encrypted)"
    if without := sorted(working - with_gpus):
        reason = f"{ranks_text(without)} without a GPU"
    if reason:
        return WorkerUcx.OFF, f"TLS; GPU data goes through host memory. No UCX: {reason}"
    return WorkerUcx.AUTO, "TLS, and UCX for GPU memory between workers (authenticated, not encrypted)"


def probing_workers(plan: Plan) -> dict[int, str | int]:
    """The first worker of each node, by its rank, which tries UCX to the next node; none in a job on one node."""
    host_of = {rank: host.host for host in plan.hosts for rank in host.ranks}
    first: dict[str, tuple[int, str | int]] = {}
    for worker in plan.workers:
        first.setdefault(host_of[worker.rank], (worker.rank, worker.name))
    return dict(first.values()) if len(first) > 1 else {}


def _reason(working: set[int], obstacles: Mapping[int, str]) -> str:
    """The first obstacle, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(working):
        if text := obstacles.get(rank, ""):
            ranks_of.setdefault(text, []).append(rank)
    for text, ranks in ranks_of.items():
        return text if len(ranks) == len(working) else f"{ranks_text(ranks)}: {text}"
    return ""
