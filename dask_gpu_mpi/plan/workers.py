"""The hosts of a job and their workers: the name, GPUs, cores, threads and memory of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dask_gpu_mpi.base.text import fold_names, fold_numbers, format_bytes, grouped, listed, parse_memory_limit
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.gpu_assignment import intersection, near_cores, share_cores
from dask_gpu_mpi.plan.model import HostPlan, WorkerPlan


@dataclass
class Host:
    """One host while the plan is made."""

    plan: HostPlan
    boot_id: str
    #: Those of its ranks that take workers.
    working: list[Inventory]
    #: For each working rank the GPUs of each of its workers; empty in a job on CPUs.
    share: dict[int, list[tuple[Gpu, ...]]] = field(default_factory=dict)


def group_by_host(ranks: Sequence[Inventory], reserved: set[int], *, use_gpus: bool) -> list[Host]:
    """The hosts in the order of their lowest ranks; `reserved` ranks take no workers."""
    names = {rank.host for rank in ranks}
    used: set[str] = set()
    hosts = []
    for members in grouped(ranks, lambda rank: (rank.host, rank.boot_id)):
        host = members[0].host
        name, number = host, 1
        while name in used or (number > 1 and name in names):
            number += 1
            name = f"{host}#{number}"
        used.add(name)
        plan = HostPlan(
            name,
            tuple(rank.rank for rank in members),
            tuple(gpus_of_host((rank.pid, rank.gpus) for rank in members)) if use_gpus else (),
            # Ranks may sit in different cgroups, and the sum of their limits need not be there.
            memory=min((rank.memory for rank in members if rank.memory), default=0),
            cpu_quota=min((rank.cpu_quota for rank in members if rank.cpu_quota is not None), default=None),
            promise=max((rank.promise for rank in members), key=lambda promise: promise.count),
        )
        hosts.append(Host(plan, members[0].boot_id, [rank for rank in members if rank.rank not in reserved]))
    return hosts


def plan_workers(
    hosts: Sequence[Host], options: Options, on_gpus: bool
) -> tuple[list[WorkerPlan], list[Problem]]:
    """All workers, in the order of ranks, of one rank GPU workers first; and warnings."""
    limit = parse_memory_limit(options.memory_limit)
    workers: list[WorkerPlan] = []
    distant: dict[str, list[str]] = {}
    limits = []
    for host in hosts:
        on_cpus = _names_on_cpus(host, options, on_gpus)
        number = sum(map(len, host.share.values())) + len(on_cpus)
        each = worker_limit(limit, host.plan.memory, number)
        limits.append((host.plan.host, each, number, host.plan.memory))
        if on_gpus:
            found, far = _on_gpus(host, options, each)
            workers += found
            distant |= {host.plan.host: far} if far else {}
        workers += _on_cpus(host, on_cpus, options.nthreads, each)
    warnings = excess_warnings(limits)
    if distant:
        problem = Problem(
            "the ranks may use no core near the GPUs of these workers, which get the ranks' cores: "
            f"{listed([worker for far in distant.values() for worker in far])}",
            fix="let the launcher bind nothing (e.g. --cpu-bind=none, --bind-to none)",
            hosts=tuple(distant),
        )
        warnings.insert(0, problem)
    # Ranks of hosts may interleave. Stable: a rank's GPU workers stay in front.
    return sorted(workers, key=lambda worker: worker.rank), warnings


def _on_gpus(host: Host, options: Options, limit: int) -> tuple[list[WorkerPlan], list[str]]:
    """The GPU workers of a host, and those of them whose ranks may use no core near their GPUs."""
    place = {gpu.uuid: number for number, gpu in enumerate(host.plan.gpus)}
    prefix = _prefix(options)
    workers, distant = [], []
    for rank in host.working:
        for gpus in host.share[rank.rank]:
            index = place[gpus[0].uuid]
            name = f"{prefix}{rank.rank}-{index}"
            near = near_cores(gpus)
            cpus = intersection(near, rank.cpus)
            if near and not cpus:
                distant.append(f"{name} on {host.plan.host} (GPU {gpus[0].index}: {fold_numbers(near)})")
            nodes = {gpu.numa for gpu in gpus if gpu.numa >= 0}
            ports = dict.fromkeys(port for gpu in gpus for port in gpu.nics.split(","))
            workers.append(
                WorkerPlan(
                    name=name,
                    rank=rank.rank,
                    host=host.plan.host,
                    kind="gpu",
                    gpu_index=index,
                    device=",".join(gpu.uuid for gpu in gpus),
                    nthreads=options.nthreads or 1,
                    memory_limit=limit,
                    cpus=cpus or rank.cpus,
                    resources={"GPU": float(len(gpus))},
                    device_memory=host.plan.gpus[index].memory,
                    device_free=host.plan.gpus[index].free,
                    numa=nodes.pop() if len(nodes) == 1 else None,
                    nics="" if "" in ports else ",".join(ports),
                )
            )
    return workers, distant


def _names_on_cpus(host: Host, options: Options, on_gpus: bool) -> list[tuple[str | int, Inventory]]:
    """A host's CPU workers, by name and rank: in a job on CPUs one of each rank, then the additional ones of the first rank."""
    prefix = _prefix(options)
    found: list[tuple[str | int, Inventory]] = []
    if not on_gpus:
        found += [(f"{prefix}{rank.rank}" if prefix else rank.rank, rank) for rank in host.working]
    for rank in host.working[:1]:
        found += [(f"{prefix}{rank.rank}-cpu-{number}", rank) for number in range(options.cpu_workers)]
    return found


def _on_cpus(
    host: Host, names: Sequence[tuple[str | int, Inventory]], nthreads: int | None, limit: int
) -> list[WorkerPlan]:
    # GPU workers mostly wait for their GPU, so only CPU workers share the cores.
    shares = share_cores([rank.cpus for _, rank in names], host.plan.cpu_quota)
    return [
        WorkerPlan(
            name=name,
            rank=rank.rank,
            host=host.plan.host,
            kind="cpu",
            gpu_index=None,
            device=None,
            nthreads=nthreads or share,
            memory_limit=limit,
            cpus=rank.cpus,
            resources={"CPU": float(nthreads or share)},
        )
        for (name, rank), share in zip(names, shares, strict=True)
    ]


def _prefix(options: Options) -> str:
    return f"{options.name}-" if options.name else ""


def worker_limit(limit: int | float | None, memory: int, workers: int) -> int:
    """The memory limit of each worker of a host, in bytes; 0: none.

    `limit` is bytes, a fraction of the host's memory, or None for an equal part (as `parse_memory_limit` gives it); `memory`
    is what the job may use on the host (0: unknown), and `workers` are those of all its ranks.

    >>> worker_limit(None, 1000, 4), worker_limit(0.5, 1000, 4), worker_limit(300, 1000, 4), worker_limit(None, 0, 4)
    (250, 500, 300, 0)
    """
    if limit is None:
        return memory // workers if workers else 0
    return int(limit * memory) if isinstance(limit, float) else limit


def excess_warnings(hosts: Iterable[tuple[str, int, int, int]]) -> list[Problem]:
    """Warn of hosts whose workers' limits add up to more than there is, which the user may want: one line for hosts alike.

    For each host: name, limit of each worker, number of workers, and memory (0: unknown).

    >>> print(*excess_warnings([("h1", 600, 2, 1000), ("h2", 600, 2, 1000), ("h3", 500, 2, 1000)]))
    on h[1-2], 2 workers with a memory limit of 600 B each may use more than the 1000 B there are
    """
    alike: dict[tuple[int, int, int], list[str]] = {}
    for name, limit, workers, memory in hosts:
        alike.setdefault((limit, workers, memory), []).append(name)
    return [
        Problem(
            f"on {fold_names(names)}, {workers} workers with a memory limit of {format_bytes(limit)} each may use more than "
            f"the {format_bytes(memory)} there are",
            hosts=tuple(names),
        )
        for (limit, workers, memory), names in alike.items()
        if 0 < memory < limit * workers
    ]
