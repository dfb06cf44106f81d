"""From the inventories of all ranks to the work of every rank: `make_plan`, a pure function, and its steps in their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dask_gpu_mpi.base.text import fold_names, format_bytes, listed, ranks_text
from dask_gpu_mpi.errors import PlacementError, Problem, world_too_small
from dask_gpu_mpi.machine import Gpu, Promise
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan, Role
from dask_gpu_mpi.plan.workers import Host, divide_gpus, group_by_host, plan_workers, scheduler_gpu


def make_plan(inventories: Iterable[Inventory], options: Options, *, has_client: bool = True) -> Plan:
    """Make the plan: which rank has which role, and which workers each rank starts.

    The inventories, one of each rank, may come in any order. `has_client`: whether the job runs a script: in layout
    "exclusive" a rank is reserved for it. Every GPU that a rank with workers sees gets exactly one worker.

    Raises PlacementError if ranks see partly the same GPUs, or can't take a worker; or if the GPUs do not make full groups of
    `gpus_per_worker`, or are in use against `require_idle_gpus`. WorldTooSmallException: fewer ranks than the layout needs.

    >>> from dask_gpu_mpi.machine.inventory import hypothetical_job
    >>> plan = make_plan(hypothetical_job(nodes=2, ranks_per_node=1, gpus_per_node=2), Options())
    >>> [(worker.name, worker.host, worker.gpu_index) for worker in plan.workers]
    [('0-0', 'h1', 0), ('0-1', 'h1', 1), ('1-0', 'h2', 0), ('1-1', 'h2', 1)]
    """
    ranks = sorted(inventories, key=lambda inventory: inventory.rank)
    numbers = [rank.rank for rank in ranks]
    if not ranks or numbers != list(range(ranks[0].world_size)):
        raise PlacementError(f"inventories of {ranks_text(numbers)}", expected="one of each rank")
    scheduler, client = choose_roles(options, len(ranks), has_client=has_client)
    reserved = reserved_ranks(options, scheduler, client, has_client=has_client)
    reserved |= {rank.rank for rank in ranks if rank.absent}
    hosts = group_by_host(ranks, reserved, use_gpus=options.worker_kind != "cpu")
    on_gpus = _on_gpus(hosts, options)
    warnings = list(dict.fromkeys(warning for rank in ranks for warning in rank.warnings))
    unseen = [] if options.worker_kind == "cpu" else unseen_gpus(hosts)
    warnings += [*unseen, *gpus_of_others(hosts), *gpus_without_worker(hosts)]
    if on_gpus:
        refuse_machine_with_two_names(hosts)
        for host in hosts:
            host.share = divide_gpus(host.plan.host, host.working, host.plan.gpus, options.gpus_per_worker)
        warnings += ranks_without_gpu(hosts, {name for one in unseen for name in one.hosts})
        warnings += gpus_in_use(hosts, refuse=options.require_idle_gpus)
    elif options.default_workers == "gpu":
        warnings.append(
            Problem(
                "default_workers=gpu has no effect: none of the ranks that take workers sees a GPU, so tasks run on all workers",
                fix=f"ask the batch system for GPUs, check {VISIBLE_DEVICES}, or leave --default-workers out",
            )
        )
    workers, of_workers = plan_workers(hosts, options, on_gpus)

    names = {rank: host.plan.host for host in hosts for rank in host.plan.ranks}
    device = ""
    if on_gpus and options.scheduler:
        device, missing = scheduler_gpu(ranks[scheduler], workers)
        warnings += missing
    return Plan(
        layout=options.layout,
        world_size=len(ranks),
        scheduler=Role(scheduler, names[scheduler]),
        client=Role(client, names[client]),
        hosts=tuple(host.plan for host in hosts),
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
    # As the default of a site it is about the GPUs that a job has.
    requires_idle = options.require_idle_gpus and "require_idle_gpus" in options.given
    if options.worker_kind == "gpu" or requires_idle:
        wanted = "GPU workers are required" if options.worker_kind == "gpu" else "idle GPUs are required"
        others = ", or --no-require-idle-gpus" if options.worker_kind != "gpu" else ""
        names = fold_names(host.plan.host for host in hosts if host.working)
        raise PlacementError(
            f"{wanted}, but none of the ranks with workers sees a GPU "
            f"({ranks_text(rank.rank for rank in working)} on {names})",
            fix=f"request GPUs from the batch system, check {VISIBLE_DEVICES}, or choose CPU workers with worker_class "
            f"(--worker-class distributed.Nanny){others}",
        )
    return False


# The ranks, and which of them has which role.


def reserved_ranks(options: Options, scheduler: int, client: int, *, has_client: bool) -> set[int]:
    """The ranks that take no workers: in layout ``exclusive`` those of the scheduler and the client, where there are such."""
    if options.layout != "exclusive":
        return set()
    return ({scheduler} if options.scheduler else set()) | ({client} if has_client else set())


def choose_roles(options: Options, world_size: int, *, has_client: bool) -> tuple[int, int]:
    """Choose the scheduler's and the client's rank; raise WorldTooSmallException where ranks are too few."""
    scheduler = options.scheduler_rank if options.scheduler else 0
    client = options.script_rank
    roles = {"scheduler": scheduler} if options.scheduler else {}
    if has_client:
        roles["client"] = client
    elif options.client_rank is None:
        client = scheduler
    # dask-mpi starts with no worker here, and waits for one forever.
    reserved = reserved_ranks(options, scheduler, client, has_client=has_client)
    least = max([client, *roles.values(), len(reserved)]) + 1
    if world_size < least:
        fix = "lower scheduler_rank and client_rank (--scheduler-rank, --client-rank)"
        if options.layout == "exclusive":
            fix = "take layout 'shared', which works with one"
        places = " and ".join(f"the {role} on rank {rank}" for role, rank in roles.items())
        raise world_too_small(
            f"layout {options.layout!r} with {places or f'client_rank={client}'} needs at least {least} ranks, found "
            f"{world_size}",
            fix=f"start more ranks, or {fix}",
        )
    return scheduler, client


# Hosts and GPUs that the user should correct or know of.


def refuse_machine_with_two_names(hosts: Sequence[Host]) -> None:
    """Raise PlacementError for one GPU under two host names of one machine (containers): it would get two workers."""
    first: dict[tuple[str, str], Host] = {}
    for host in hosts:
        for gpu in host.plan.gpus:
            other = first.setdefault((host.boot_id, gpu.uuid), host)
            if other is not host:
                raise PlacementError(
                    f"GPU {gpu.index} ({gpu.uuid}) is seen by {ranks_text(other.plan.ranks)} on {other.plan.host} "
                    f"and by {ranks_text(host.plan.ranks)} on {host.plan.host}, two names of one machine (boot id "
                    f"{host.boot_id or 'unknown'})",
                    fix=f"give it one host name, or each name its own GPUs by {VISIBLE_DEVICES}",
                )


def gpus_without_worker(hosts: Sequence[Host]) -> list[Problem]:
    """GPUs that only reserved ranks see (layout ``exclusive``)."""
    lost: dict[str, int] = {}
    for host in hosts:
        seen = {gpu.uuid for rank in host.working for gpu in rank.gpus}
        if number := sum(gpu.uuid not in seen for gpu in host.plan.gpus):
            lost[host.plan.host] = number
    if not lost:
        return []
    places = [f"{number} on {name}" for name, number in lost.items()]
    count = sum(lost.values())
    return [
        Problem(
            f"{count} {'GPU gets' if count == 1 else 'GPUs get'} no worker, because only ranks that take no workers see them: "
            f"{listed(places)}",
            fix="let all ranks of a host see its GPUs, or take layout 'shared'",
            hosts=tuple(lost),
        )
    ]


#: Of a warning that `check` replaces by a finding of its own.
UNSEEN = "unseen GPUs"


def unseen_gpus(hosts: Sequence[Host]) -> list[Problem]:
    """Hosts that have GPUs, by the batch system or the driver, and nobody sees one."""
    alike: dict[Promise, list[str]] = {}
    for host in hosts:
        if host.plan.promise.source and not host.plan.gpus:
            alike.setdefault(host.plan.promise, []).append(host.plan.host)
    return [
        Problem(
            f"no GPU is visible on {fold_names(names)}, although {promise.source}: no GPU worker starts there",
            fix=f"{promise.fix}; or set {VISIBLE_DEVICES}='' if the job is to do without GPUs",
            what=UNSEEN,
            hosts=tuple(names),
        )
        for promise, names in alike.items()
    ]


def gpus_of_others(hosts: Sequence[Host]) -> list[Problem]:
    """Hosts on which the job sees more GPUs than it has."""
    return [
        Problem(
            f"{len(host.plan.gpus)} GPUs are visible on {host.plan.host}, although {host.plan.promise.source}: "
            "other jobs may use them",
            fix=f"request whole nodes, or set {VISIBLE_DEVICES} to the GPUs of this job",
            what="GPUs of other jobs",
            hosts=(host.plan.host,),
        )
        for host in hosts
        if host.plan.promise.is_shared and host.plan.promise.count < len(host.plan.gpus)
    ]


def ranks_without_gpu(hosts: Sequence[Host], unseen: Iterable[str]) -> list[Problem]:
    """Ranks that get no GPU, in a job on GPUs; for the hosts of `unseen` there is another line."""
    without = {h.plan.host: [rank.rank for rank in h.working if not h.share[rank.rank]] for h in hosts}
    without = {name: ranks for name, ranks in without.items() if ranks and name not in unseen}
    places = [f"{ranks_text(ranks)} on {name}" for name, ranks in without.items()]
    if not places:
        return []
    found = [rank for ranks in without.values() for rank in ranks]
    get = "gets none and starts" if len(found) == 1 else f"get none, and these {len(found)} ranks start"
    return [
        Problem(
            f"more ranks than GPUs: {listed(places)} {get} no GPU worker (one rank per node is enough; --cpu-workers adds "
            "CPU workers)",
            ranks=tuple(found),
            hosts=tuple(without),
        )
    ]


def gpus_in_use(hosts: Sequence[Host], *, refuse: bool) -> list[Problem]:
    """GPUs on which other processes hold memory; `refuse`: raise PlacementError if one of them gets a worker."""
    busy = [(host, gpu) for host in hosts for gpu in host.plan.gpus if gpu.processes]
    with_worker = {
        gpu.uuid for host in hosts for sets in host.share.values() for gpus in sets for gpu in gpus
    }
    refused = [_in_use(host, gpu) for host, gpu in busy if gpu.uuid in with_worker]
    if refuse and refused:
        raise PlacementError(
            listed(refused),
            expected="idle GPUs: require_idle_gpus, --require-idle-gpus",
            fix=f"end those processes, leave the GPUs out with {VISIBLE_DEVICES}, or allow them with "
            "--no-require-idle-gpus",
        )
    return [Problem(_in_use(host, gpu), hosts=(host.plan.host,)) for host, gpu in busy]


def _in_use(host: Host, gpu: Gpu) -> str:
    name = f"host {host.plan.host}: GPU {gpu.index} ({gpu.uuid})"
    if gpu.busy is None:
        return f"{name} has memory in use by other processes (NVML does not report how much)"
    return f"{name} has {gpu.busy} bytes ({format_bytes(gpu.busy)}) in use by other processes"


def existing_contexts(ranks: Sequence[Inventory]) -> list[Problem]:
    """CUDA contexts of the ranks' own processes."""
    having = [rank for rank in ranks if rank.contexts]
    places = [f"rank {rank.rank} on {rank.host} ({', '.join(rank.contexts)})" for rank in having]
    if not places:
        return []
    return [
        Problem(
            f"CUDA contexts were made before the cluster started, and take device memory from the workers: {listed(places)}",
            fix="use CUDA only after initialize(), or check what the script imports (or a GPU-aware MPI)",
            ranks=tuple(rank.rank for rank in having),
            hosts=tuple(dict.fromkeys(rank.host for rank in having)),
        )
    ]
