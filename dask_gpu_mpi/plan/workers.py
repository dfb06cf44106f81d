"""The workers of a job: the name, GPUs, cores, threads and memory of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.base.text import fold_names, fold_numbers, format_bytes, parse_memory_limit
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import device_sizes
from dask_gpu_mpi.plan.gpu_assignment import intersection, near_cores, share_cores
from dask_gpu_mpi.plan.hosts import Host, name_some
from dask_gpu_mpi.plan.model import WorkerPlan


@dataclass(frozen=True)
class _Draft:
    """A worker before threads and memory are shared out."""

    name: str | int
    rank: Inventory
    cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    gpu_index: int | None = None
    #: Why it gets cores that are not near its GPUs; empty: they are, or it has none.
    distant: str = ""


def plan_workers(
    hosts: Sequence[Host], options: Options, on_gpus: bool, asked: Mapping[int, Mapping[str, Any]]
) -> tuple[list[WorkerPlan], list[Problem]]:
    """All workers, in the order of ranks, of one rank GPU workers first; and warnings. `asked`: by rank, its device options."""
    limit = parse_memory_limit(options.memory_limit)
    workers: list[WorkerPlan] = []
    distant: list[tuple[str, str]] = []
    limits = []
    for host in hosts:
        drafts = (_on_gpus(host, options) if on_gpus else _on_cpus(host, options)) + _added(host, options)
        each = worker_limit(limit, host.memory, len(drafts))
        limits.append((host.name, each, len(drafts), host.memory))
        distant += [(host.name, draft.distant) for draft in drafts if draft.distant]
        workers += _finish(host, drafts, options, each, asked)
    warnings = excess_warnings(limits)
    if distant:
        problem = Problem(
            "the ranks may use no core near the GPUs of these workers, which get the ranks' cores: "
            f"{name_some([place for _, place in distant])}",
            fix="let the launcher bind nothing (e.g. --cpu-bind=none, --bind-to none)",
            hosts=tuple(dict.fromkeys(host for host, _ in distant)),
        )
        warnings.insert(0, problem)
    # Ranks of hosts may interleave. Stable: a rank's GPU workers stay in front.
    return sorted(workers, key=lambda worker: worker.rank), warnings


def _prefix(options: Options) -> str:
    return f"{options.name}-" if options.name else ""


def _on_gpus(host: Host, options: Options) -> list[_Draft]:
    place = {gpu.uuid: number for number, gpu in enumerate(host.gpus)}
    drafts = []
    for rank in host.working:
        for gpus in host.share[rank.rank]:
            index = place[gpus[0].uuid]
            name = f"{_prefix(options)}{rank.rank}-{index}"
            near = near_cores(gpus)
            cpus = intersection(near, rank.cpus)
            distant = ""
            if near and not cpus:
                distant = f"{name} on {host.name} (GPU {gpus[0].index}: {fold_numbers(near)})"
            drafts.append(_Draft(name, rank, cpus or rank.cpus, gpus, index, distant))
    return drafts


def _on_cpus(host: Host, options: Options) -> list[_Draft]:
    prefix = _prefix(options)
    return [_Draft(f"{prefix}{rank.rank}" if prefix else rank.rank, rank, rank.cpus) for rank in host.working]


def _added(host: Host, options: Options) -> list[_Draft]:
    """The additional CPU workers, all of the first rank."""
    return [
        _Draft(f"{_prefix(options)}{rank.rank}-cpu-{number}", rank, rank.cpus)
        for rank in host.working[:1]
        for number in range(options.cpu_workers)
    ]


def _finish(
    host: Host,
    drafts: Sequence[_Draft],
    options: Options,
    limit: int,
    asked: Mapping[int, Mapping[str, Any]],
) -> list[WorkerPlan]:
    # GPU workers mostly wait for their GPU, so only CPU workers share the cores.
    threads = iter(share_cores([draft.cpus for draft in drafts if not draft.gpus], host.cpu_quota))
    workers = []
    for draft in drafts:
        nodes = {gpu.numa for gpu in draft.gpus if gpu.numa >= 0}
        ports = dict.fromkeys(port for gpu in draft.gpus for port in gpu.nics.split(","))
        nthreads = options.nthreads or (1 if draft.gpus else next(threads))
        workers.append(
            WorkerPlan(
                name=draft.name,
                rank=draft.rank.rank,
                host=host.name,
                kind="gpu" if draft.gpus else "cpu",
                gpu_index=draft.gpu_index,
                device=",".join(gpu.uuid for gpu in draft.gpus) or None,
                nthreads=nthreads,
                memory_limit=limit,
                cpus=draft.cpus,
                resources={"GPU": float(len(draft.gpus))} if draft.gpus else {"CPU": float(nthreads)},
                device_sizes=device_sizes(asked.get(draft.rank.rank, {}), draft.gpus[0].memory)
                if draft.gpus
                else {},
                numa=nodes.pop() if len(nodes) == 1 else None,
                nics="" if "" in ports else ",".join(ports),
            )
        )
    return workers


def worker_limit(limit: int | float | None, memory: int, workers: int) -> int:
    """Give the memory limit of each worker of a host, in bytes; 0: none.

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
