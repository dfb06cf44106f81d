"""What the workers of a job send each other over UCX, once there is a plan: pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.ucx import UcxAbility, missing_ucx, obstacle_between_nodes, opened_by
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Transport, WorkerUcx
from dask_gpu_mpi.plan.plan import Plan

__all__ = ["choose_transport", "probing_workers", "ucx_ability"]


def ucx_ability(options: Options, *, gpus: bool, environ: Mapping[str, str] | None = None) -> UcxAbility:
    """How far the workers of this rank can use UCX beside TLS.

    Parameters
    ----------
    options : Options
        What the user asked for.
    gpus : bool
        Whether this rank sees GPUs.
    environ : mapping, optional
        Of this process, by default its own.
    """
    wanted = options.worker_ucx
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not gpus):
        return UcxAbility()
    if str(options.worker_class).rpartition(".")[2] == "Worker":
        return UcxAbility(
            "workers of the class distributed.Worker run in the agent. Fix: worker_class (--worker-class) distributed.Nanny"
        )
    if wanted is WorkerUcx.AUTO and options.worker_class != "auto" and options.worker_kind != "gpu":
        return UcxAbility(
            "worker_class is not dask_cuda.CUDAWorker. Fix: leave it out, or choose --protocol tls"
        )
    environ = os.environ if environ is None else environ
    opened = opened_by(environ, options.worker_options)
    return UcxAbility(
        missing_ucx(device_memory=gpus), "" if opened else obstacle_between_nodes(environ), opened
    )


def choose_transport(
    wanted: WorkerUcx, plan: Plan, abilities: Mapping[int, UcxAbility], *, attaches: bool = False
) -> Transport:
    """What goes over UCX, and the line that says so and why.

    Parameters
    ----------
    wanted : WorkerUcx
        What the user asked for.
    plan : Plan
        Of the job.
    abilities : mapping
        By rank.
    attaches : bool
        Whether the workers are added to those of a running cluster.

    Raises
    ------
    InputError
        The user asked for UCX, and a rank can't use it.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return Transport()
    reason = _reason(working, abilities, lambda ability: ability.obstacle)
    if wanted is WorkerUcx.ALL and reason:
        raise InputError(f"protocol 'ucx': {reason}")
    if len(plan.workers) == 1 and not attaches:
        return Transport()
    if wanted is WorkerUcx.AUTO and (without := sorted(working - with_gpus)):
        reason = f"{ranks_text(without)} without a GPU"
    nodes = {worker.host for worker in plan.workers}
    within = _reason(working, abilities, lambda ability: ability.between_nodes)
    if not reason and within and len(nodes) == len(plan.workers) and not attaches:
        reason = f"each node has one worker, and UCX leads to no other node: {within}"
    if reason:
        data = "all data is encrypted" if wanted is WorkerUcx.ALL else "GPU data goes through host memory"
        return Transport(line=f"TLS; {data}. No UCX: {reason}")
    data = "large data" if wanted is WorkerUcx.ALL else "GPU memory"
    line = f"TLS, and UCX for {data} between workers"
    if within and len(nodes) > 1:
        line += f" of a node (authenticated, not encrypted). Between nodes TLS alone: {within}"
    else:
        line += " (authenticated, not encrypted)"
    warning = ""
    if opened := _reason(working, abilities, lambda ability: ability.opened_by):
        warning = (
            f"{opened} has UCX open a TCP port in each worker, and UCX checks nobody: anyone who reaches the port can run code "
            "as you. Fix: leave the setting out; within a node UCX needs no TCP"
        )
    return Transport(wanted, line, warning, not within)


def probing_workers(plan: Plan) -> dict[int, str | int]:
    """The first worker of each node, by its rank, which tries UCX to the next node; none in a job on one node."""
    host_of = {rank: host.host for host in plan.hosts for rank in host.ranks}
    first: dict[str, tuple[int, str | int]] = {}
    for worker in plan.workers:
        first.setdefault(host_of[worker.rank], (worker.rank, worker.name))
    return dict(first.values()) if len(first) > 1 else {}


def _reason(
    working: set[int], abilities: Mapping[int, UcxAbility], text_of: Callable[[UcxAbility], str]
) -> str:
    """The first text that an ability has, with its ranks unless all have it; empty: none has one."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(working):
        if text := text_of(abilities.get(rank, UcxAbility())):
            ranks_of.setdefault(text, []).append(rank)
    for text, ranks in ranks_of.items():
        return text if len(ranks) == len(working) else f"{ranks_text(ranks)}: {text}"
    return ""
