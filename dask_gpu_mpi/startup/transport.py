"""What the workers of a job send each other over UCX, chosen once there is a plan: pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.network.ucx import UcxAbility, missing_ucx, obstacle_between_nodes, opened_by
from dask_gpu_mpi.options.model import Options, Transport, WorkerUcx
from dask_gpu_mpi.plan import Plan


def ucx_ability(options: Options, *, gpus: bool) -> UcxAbility:
    """How far the workers of this rank can use UCX beside TLS.

    `options`: what the user asked for. `gpus`: whether this rank sees GPUs.
    """
    wanted = options.worker_ucx
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not gpus):
        return UcxAbility()
    if str(options.worker_class).rpartition(".")[2] == "Worker":
        return UcxAbility(
            Problem(
                "workers of the class distributed.Worker run in the agent",
                fix="worker_class (--worker-class) distributed.Nanny",
            )
        )
    if wanted is WorkerUcx.AUTO and options.worker_class != "auto" and options.worker_kind != "gpu":
        return UcxAbility(
            Problem("worker_class is not dask_cuda.CUDAWorker", fix="leave it out, or choose --protocol tls")
        )
    opened = opened_by(os.environ, options.worker_options)
    return UcxAbility(
        missing_ucx(device_memory=gpus), "" if opened else obstacle_between_nodes(os.environ), opened
    )


def choose_transport(
    wanted: WorkerUcx,
    plan: Plan,
    abilities: Mapping[int, UcxAbility],
    *,
    attaches: bool = False,
    sealed: bool = True,
) -> Transport:
    """The data that goes over UCX, and the line that says so and why.

    `wanted`: what the user asked for. `plan`: of the job. `abilities`: by rank. `attaches`: whether the workers are added to
    those of a running cluster. `sealed`: whether streams are encrypted. Raises InputError: the user asked for UCX, and a rank
    can't use it.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    open_data = "large arrays are not encrypted (data_encryption)"
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return Transport(line=Problem("" if sealed else f"TLS; {open_data}"))
    reason = _reason(working, abilities, lambda ability: ability.obstacle)
    if wanted is WorkerUcx.ALL and reason:
        raise InputError(f"protocol 'ucx': {reason.text}", fix=reason.fix)
    if len(plan.workers) == 1 and not attaches:
        return Transport()
    if wanted is WorkerUcx.AUTO and (without := sorted(working - with_gpus)):
        reason = Problem(f"{ranks_text(without)} without a GPU")
    nodes = {worker.host for worker in plan.workers}
    within = _reason(working, abilities, lambda ability: ability.between_nodes)
    if not reason and within and len(nodes) == len(plan.workers) and not attaches:
        reason = Problem(f"each node has one worker, and UCX leads to no other node: {within.text}")
    if reason:
        data = "all data is encrypted" if wanted is WorkerUcx.ALL else "GPU data goes through host memory"
        data = data if sealed else open_data
        return Transport(line=Problem(f"TLS; {data}. No UCX: {reason.text}", fix=reason.fix))
    data = "large data" if wanted is WorkerUcx.ALL else "GPU memory"
    line = f"TLS, and UCX for {data} between workers"
    if within and len(nodes) > 1:
        between = "encrypted streams" if sealed else f"streams, where {open_data}"
        line += f" of a node (authenticated, not encrypted). Between nodes {between}: {within.text}"
    else:
        line += " (authenticated, not encrypted)"
    warning = None
    if opened := _reason(working, abilities, lambda ability: ability.opened_by):
        warning = Problem(
            f"{opened.text} has UCX open a TCP port in each worker, and UCX checks nobody: anyone who reaches the port can run "
            "code as you",
            fix="leave the setting out; within a node UCX needs no TCP",
            what="transport",
        )
    return Transport(wanted, Problem(line), warning, not within)


def _reason(
    working: set[int],
    abilities: Mapping[int, UcxAbility],
    reason_of: Callable[[UcxAbility], Problem | str | None],
) -> Problem | None:
    """The first reason that an ability has, with its ranks unless all have it; None: none has one."""
    ranks_of: dict[Problem | str, list[int]] = {}
    for rank in sorted(working):
        if reason := reason_of(abilities.get(rank, UcxAbility())):
            ranks_of.setdefault(reason, []).append(rank)
    for reason, ranks in ranks_of.items():
        problem = reason if isinstance(reason, Problem) else Problem(reason)
        return problem if len(ranks) == len(working) else replace(problem, where=ranks_text(ranks))
    return None
