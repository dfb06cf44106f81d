"""From what every rank saw to what every rank is to do: `make_plan`, a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dask_gpu_mpi.base.hostlist import fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.base.sizes import format_bytes, parse_memory_limit
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host
from dask_gpu_mpi.machine.inventory import Inventory

from .device_memory import check_device_memory
from .gpu_assignment import divide_gpus, near_cores, share_cores
from .host_memory import Excess, worker_limit
from .model import HostPlan, PlacementOptions, Role, WorkerPlan
from .plan import Plan
from .roles import check_options, choose_roles, in_order, reserved_ranks

__all__ = ["HostPlan", "PlacementOptions", "Plan", "Role", "WorkerPlan", "make_plan"]

# A warning about a large job names so many places and counts the others.
_MOST_PLACES = 8


@dataclass
class _Host:
    """One host while the plan is made."""

    name: str
    ranks: list[Inventory]
    working: list[Inventory]
    gpus: list[Gpu]
    memory: int
    cpu_quota: float | None
    share: dict[int, list[tuple[Gpu, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Draft:
    """A worker before threads and memory are shared out."""

    name: str | int
    rank: Inventory
    cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    gpu_index: int | None = None


def make_plan(inventories: Iterable[Inventory], options: PlacementOptions) -> Plan:
    """Make the plan: who has which role, and which workers each rank starts.

    Parameters
    ----------
    inventories : iterable of Inventory
        One of each rank, in any order; the plan does not depend on it.
    options : PlacementOptions
        What the user says.

    Returns
    -------
    Plan
        Every GPU that a rank with workers sees has exactly one worker.

    Raises
    ------
    PlacementError
        Ranks are missing or double, ranks of a host see partly the same GPUs, or no rank can take a worker; the GPUs do not
        make full groups of `gpus_per_worker`, or are in use against `require_idle_gpus`.
    OptionError
        An option has no meaning, or asks for more memory than a worker's GPU has.
    WorldTooSmallException
        Fewer ranks than the layout needs.

    Examples
    --------
    >>> from dask_gpu_mpi.plan.synthetic import pretend
    >>> plan = make_plan(pretend(nodes=2, ranks_per_node=1, gpus_per_node=2), PlacementOptions())
    >>> [(worker.name, worker.host, worker.gpu_index) for worker in plan.workers]
    [('0-0', 'h1', 0), ('0-1', 'h1', 1), ('1-0', 'h2', 0), ('1-1', 'h2', 1)]
    """
    ranks = in_order(inventories)
    check_options(options)
    scheduler, client = choose_roles(options, len(ranks))
    idle = reserved_ranks(options, scheduler, client)
    hosts = _hosts(ranks, idle, use_gpus=options.worker_kind != "cpu")
    on_gpus = _on_gpus(hosts, options)
    warnings = list(dict.fromkeys(warning for rank in ranks for warning in rank.warnings))
    if on_gpus:
        _same_machine_twice(hosts)
        for host in hosts:
            host.share = divide_gpus(host.name, host.working, host.gpus, options.gpus_per_worker)
        if options.require_idle_gpus:
            _refuse_busy(hosts)
    warnings += _left_over(hosts) + (_no_gpu_left(hosts) + _busy(hosts) if on_gpus else [])
    warnings += _contexts(ranks)
    workers = _workers(hosts, options, on_gpus, warnings)

    names = {rank.rank: host.name for host in hosts for rank in host.ranks}
    made = Plan(
        layout=options.layout,
        world_size=len(ranks),
        scheduler=Role(scheduler, names[scheduler]),
        client=Role(client, names[client]),
        hosts=tuple(
            HostPlan(
                host.name,
                tuple(rank.rank for rank in host.ranks),
                tuple(host.gpus),
                host.memory,
                host.cpu_quota,
            )
            for host in hosts
        ),
        workers=tuple(workers),
        warnings=tuple(warnings),
    )
    check_device_memory(made, {rank.rank: rank.device_options for rank in ranks})
    return made


def _on_gpus(hosts: Sequence[_Host], options: PlacementOptions) -> bool:
    """Choose between a job on GPUs and one on CPUs alone; refuse one that wants GPUs and sees none."""
    working = [rank for host in hosts for rank in host.working]
    if options.worker_kind == "cpu" or any(rank.gpus for rank in working):
        return options.worker_kind != "cpu"
    if options.worker_kind == "gpu":
        names = fold_names(host.name for host in hosts if host.working)
        raise PlacementError(
            f"GPU workers are asked for, but none of the ranks that take workers sees a GPU "
            f"({ranks_text(rank.rank for rank in working)} on {names}); ask the batch system for GPUs, "
            "look at CUDA_VISIBLE_DEVICES, or take CPU workers with worker_class (--worker-class distributed.Nanny)"
        )
    return False


def _hosts(ranks: Sequence[Inventory], idle: set[int], *, use_gpus: bool) -> list[_Host]:
    groups: dict[tuple[str, str], list[Inventory]] = {}
    for rank in ranks:
        groups.setdefault((rank.host, rank.boot_id), []).append(rank)
    hosts: list[_Host] = []
    taken = {name for name, _ in groups}
    used: set[str] = set()
    for (host, _), members in groups.items():
        name, number = host, 1
        while name in used or (number > 1 and name in taken):
            number += 1
            name = f"{host}#{number}"
        used.add(name)
        hosts.append(
            _Host(
                name=name,
                ranks=members,
                working=[rank for rank in members if rank.rank not in idle],
                gpus=gpus_of_host((rank.pid, rank.gpus) for rank in members) if use_gpus else [],
                memory=min((rank.memory for rank in members if rank.memory > 0), default=0),
                cpu_quota=min(
                    (rank.cpu_quota for rank in members if rank.cpu_quota is not None), default=None
                ),
            )
        )
    return hosts


def _same_machine_twice(hosts: Sequence[_Host]) -> None:
    """Refuse one GPU under two host names of one machine (containers): it would get two workers."""
    seen: dict[tuple[str, str], _Host] = {}
    for host in hosts:
        boot_id = host.ranks[0].boot_id
        for gpu in host.gpus:
            other = seen.setdefault((boot_id, gpu.uuid), host)
            if other is not host:
                raise PlacementError(
                    f"GPU {gpu.index} ({gpu.uuid}) is seen by {ranks_text(r.rank for r in other.ranks)} on "
                    f"{other.name} and by {ranks_text(r.rank for r in host.ranks)} on {host.name}, two "
                    "names of one "
                    f"machine (boot id {boot_id or 'unknown'}); give it one host name, or each name its own "
                    "GPUs by CUDA_VISIBLE_DEVICES"
                )


def _left_over(hosts: Sequence[_Host]) -> list[str]:
    lost = {h.name: len(h.gpus) - len({g.uuid for rank in h.working for g in rank.gpus}) for h in hosts}
    places = [f"{number} on {name}" for name, number in lost.items() if number]
    if not places:
        return []
    count = sum(lost.values())
    return [
        f"{count} {'GPU gets' if count == 1 else 'GPUs get'} no worker, because only ranks that take no "
        f"workers see them: {_some(places)}; let all ranks of a host see its GPUs, or take layout 'shared'"
    ]


def _no_gpu_left(hosts: Sequence[_Host]) -> list[str]:
    without = {h.name: [rank.rank for rank in h.working if not h.share[rank.rank]] for h in hosts}
    places = [f"{ranks_text(ranks)} on {name}" for name, ranks in without.items() if ranks]
    if not places:
        return []
    count = sum(map(len, without.values()))
    return [
        f"more ranks than GPUs: {_some(places)} "
        f"{'gets none and starts' if count == 1 else f'get none, and these {count} ranks start'} "
        "no GPU worker (one rank per node is enough; --cpu-workers adds CPU workers)"
    ]


def _busy(hosts: Sequence[_Host]) -> list[str]:
    return [_in_use(host, gpu) for host in hosts for gpu in host.gpus if gpu.processes]


def _in_use(host: _Host, gpu: Gpu) -> str:
    name = f"host {host.name}: GPU {gpu.index} ({gpu.uuid})"
    if gpu.busy is None:
        return f"{name} has memory in use by other processes (how much, NVML does not say)"
    return f"{name} has {gpu.busy} bytes ({format_bytes(gpu.busy)}) in use by other processes"


def _refuse_busy(hosts: Sequence[_Host]) -> None:
    """Raise PlacementError where a GPU that gets a worker is in use."""
    taken = {gpu.uuid for host in hosts for sets in host.share.values() for gpus in sets for gpu in gpus}
    found = [_in_use(host, gpu) for host in hosts for gpu in host.gpus if gpu.processes and gpu.uuid in taken]
    if found:
        raise PlacementError(
            f"{_some(found)}; needed: idle GPUs (require_idle_gpus, --require-idle-gpus); end those processes, leave the GPUs "
            "out with CUDA_VISIBLE_DEVICES, or allow them with --no-require-idle-gpus"
        )


def _contexts(ranks: Sequence[Inventory]) -> list[str]:
    places = [
        f"rank {rank.rank} on {rank.host} ({', '.join(rank.contexts)})" for rank in ranks if rank.contexts
    ]
    if not places:
        return []
    return [
        f"CUDA contexts were made before the cluster started, and take device memory from the workers: {_some(places)}; let "
        "the script use CUDA only after initialize(), or look at what it imports (or at a GPU-aware MPI)"
    ]


def _workers(
    hosts: Sequence[_Host], options: PlacementOptions, on_gpus: bool, warnings: list[str]
) -> list[WorkerPlan]:
    """Plan all workers, in the order of ranks; what a person should know is added to `warnings`."""
    limit = parse_memory_limit(options.memory_limit)
    workers: list[WorkerPlan] = []
    away: list[str] = []
    excess = Excess()
    for host in hosts:
        drafts = _drafts(host, options, on_gpus, away)
        each = worker_limit(limit, host.memory, len(drafts))
        excess.add(host.name, each, len(drafts), host.memory)
        workers += _finish(host, drafts, options, each)
    if away:
        warnings.append(
            "the ranks may use no core near the GPUs of these workers, which get the ranks' cores: "
            f"{_some(away)}; let the launcher bind nothing (e.g. --cpu-bind=none, --bind-to none)"
        )
    warnings += excess.warnings()
    # Ranks of hosts may interleave. Stable: a rank's GPU workers stay in front.
    return sorted(workers, key=lambda worker: worker.rank)


def _drafts(host: _Host, options: PlacementOptions, on_gpus: bool, away: list[str]) -> list[_Draft]:
    prefix = f"{options.name}-" if options.name else ""
    drafts: list[_Draft] = []
    if on_gpus:
        place = {gpu.uuid: number for number, gpu in enumerate(host.gpus)}
        for rank in host.working:
            for gpus in host.share[rank.rank]:
                index = place[gpus[0].uuid]
                name = f"{prefix}{rank.rank}-{index}"
                near = near_cores(gpus)
                cpus = _both(near, rank.cpus)
                if near and not cpus:
                    away.append(f"{name} on {host.name} (GPU {gpus[0].index}: {fold_numbers(near)})")
                drafts.append(_Draft(name, rank, cpus or rank.cpus, gpus, index))
    else:
        drafts += [
            _Draft(f"{prefix}{rank.rank}" if prefix else rank.rank, rank, rank.cpus) for rank in host.working
        ]
    if host.working:
        first = host.working[0]
        drafts += [
            _Draft(f"{prefix}{first.rank}-cpu-{i}", first, first.cpus) for i in range(options.cpu_workers)
        ]
    return drafts


@lru_cache(maxsize=1024)  # hosts are alike, and masks are long
def _both(near: frozenset[int], allowed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(near.intersection(allowed)))


def _finish(host: _Host, drafts: Sequence[_Draft], options: PlacementOptions, limit: int) -> list[WorkerPlan]:
    # GPU workers mostly wait for their GPU, so only CPU workers share the cores.
    threads = iter(share_cores([draft.cpus for draft in drafts if not draft.gpus], host.cpu_quota))
    workers = []
    for draft in drafts:
        on_gpu = bool(draft.gpus)
        nthreads = 1 if on_gpu else next(threads)
        if options.nthreads is not None:
            nthreads = options.nthreads
        workers.append(
            WorkerPlan(
                name=draft.name,
                rank=draft.rank.rank,
                host=host.name,
                kind="gpu" if on_gpu else "cpu",
                gpu_index=draft.gpu_index,
                device=",".join(gpu.uuid for gpu in draft.gpus) or None,
                nthreads=nthreads,
                memory_limit=limit,
                cpus=draft.cpus,
                resources={"GPU": float(len(draft.gpus))} if on_gpu else {"CPU": float(nthreads)},
            )
        )
    return workers


def _some(places: Sequence[str]) -> str:
    text = ", ".join(places[:_MOST_PLACES])
    more = len(places) - _MOST_PLACES
    return f"{text} and {more} more" if more > 0 else text
