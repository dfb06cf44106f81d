"""From the inventories of all ranks to what every rank is to do: `make_plan`, a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dask_gpu_mpi.base.text import fold_names, ranks_text
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import device_memory
from dask_gpu_mpi.plan.gpu_assignment import divide_gpus, scheduler_gpu
from dask_gpu_mpi.plan.hosts import (
    Host,
    existing_contexts,
    gpus_in_use,
    gpus_without_worker,
    group_by_host,
    ranks_without_gpu,
    refuse_gpus_in_use,
    refuse_machine_with_two_names,
)
from dask_gpu_mpi.plan.model import Role
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.roles import choose_roles, in_order, reserved_ranks
from dask_gpu_mpi.plan.workers import plan_workers


def make_plan(
    inventories: Iterable[Inventory],
    options: Options,
    *,
    has_client: bool = True,
    device_options: Mapping[int, Mapping[str, Any]] | None = None,
) -> Plan:
    """Make the plan: which rank has which role, and which workers each rank starts.

    The inventories, one of each rank, may come in any order. `has_client`: whether the job runs a script: in layout
    "exclusive" a rank is reserved for it. `device_options`: by rank, the sizes of device memory that its workers are to use,
    which may differ (`device_memory.device_options`; by default those of `options`). Every GPU that a rank with workers sees
    gets exactly one worker.

    Raises PlacementError if ranks are missing or double, see partly the same GPUs, or can't take a worker; or if the GPUs do
    not make full groups of `gpus_per_worker`, or are in use against `require_idle_gpus`. OptionError: more memory than a
    worker's GPU has. WorldTooSmallException: fewer ranks than the layout needs.

    >>> from dask_gpu_mpi.plan.synthetic import hypothetical_job
    >>> plan = make_plan(hypothetical_job(nodes=2, ranks_per_node=1, gpus_per_node=2), Options())
    >>> [(worker.name, worker.host, worker.gpu_index) for worker in plan.workers]
    [('0-0', 'h1', 0), ('0-1', 'h1', 1), ('1-0', 'h2', 0), ('1-1', 'h2', 1)]
    """
    ranks = in_order(inventories)
    scheduler, client = choose_roles(options, len(ranks), has_client=has_client)
    reserved = reserved_ranks(options, scheduler, client, has_client=has_client)
    reserved |= {rank.rank for rank in ranks if rank.absent}
    hosts = group_by_host(ranks, reserved, use_gpus=options.worker_kind != "cpu")
    on_gpus = _on_gpus(hosts, options)
    warnings = list(dict.fromkeys(warning for rank in ranks for warning in rank.warnings))
    warnings += gpus_without_worker(hosts)
    if on_gpus:
        refuse_machine_with_two_names(hosts)
        for host in hosts:
            host.share = divide_gpus(host.name, host.working, host.gpus, options.gpus_per_worker)
        if options.require_idle_gpus:
            refuse_gpus_in_use(hosts)
        warnings += ranks_without_gpu(hosts) + gpus_in_use(hosts)
    asked = device_options
    if asked is None:
        asked = dict.fromkeys(range(len(ranks)), device_memory.device_options(options))
    workers, of_workers = plan_workers(hosts, options, on_gpus, asked)

    names = {rank.rank: host.name for host in hosts for rank in host.ranks}
    device = ""
    if on_gpus and options.scheduler:
        device, missing = scheduler_gpu(ranks[scheduler], workers)
        warnings += missing
    planned = tuple(host.plan() for host in hosts)
    device_memory.check_device_memory(planned, workers, asked)
    return Plan(
        layout=options.layout,
        world_size=len(ranks),
        scheduler=Role(scheduler, names[scheduler]),
        client=Role(client, names[client]),
        hosts=planned,
        workers=tuple(workers),
        warnings=(*warnings, *existing_contexts(ranks), *of_workers),
        scheduler_device=device,
    )


def _on_gpus(hosts: Sequence[Host], options: Options) -> bool:
    """Choose between a job on GPUs and one on CPUs alone; refuse one that wants GPUs and sees none."""
    working = [rank for host in hosts for rank in host.working]
    if options.worker_kind == "cpu":
        return False
    if any(rank.gpus for rank in working):
        return True
    if options.worker_kind == "gpu":
        names = fold_names(host.name for host in hosts if host.working)
        raise PlacementError(
            "GPU workers are asked for, but none of the ranks that take workers sees a GPU "
            f"({ranks_text(rank.rank for rank in working)} on {names})",
            fix=f"ask the batch system for GPUs, check {VISIBLE_DEVICES}, or take CPU workers with worker_class "
            "(--worker-class distributed.Nanny)",
        )
    return False
