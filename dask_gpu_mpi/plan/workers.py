"""The hosts of a job and their workers: the name, GPUs, cores, threads and memory of each, and how GPUs are divided.

For `plan.planner`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

from dask_gpu_mpi.base.text import (
    fold_names,
    fold_numbers,
    format_bytes,
    grouped,
    listed,
    parse_memory_limit,
    ranks_text,
)
from dask_gpu_mpi.errors import PlacementError, Problem
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import HostPlan, WorkerPlan


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


def gpus_of_host(views: Iterable[tuple[int, Iterable[Gpu]]]) -> list[Gpu]:
    """Merge the GPUs that the ranks of one host see (by process id), in PCI order; ranks do not count as other processes.

    Each rank queries at another time, so the least free and the most used memory counts.
    """
    seen = [(pid, tuple(gpus)) for pid, gpus in views]
    ranks = {pid for pid, _ in seen}
    merged = []
    for same in grouped([gpu for _, gpus in seen for gpu in gpus], lambda gpu: gpu.uuid):
        held: dict[int, int | None] = {}
        for pid, size in [process for gpu in same for process in gpu.processes]:
            if pid not in ranks:
                before = held.get(pid)
                held[pid] = size if before is None else max(before, size or 0)
        free = min((gpu.free for gpu in same if gpu.free >= 0), default=-1)
        merged.append(replace(same[0], free=free, processes=tuple(held.items())))
    # With cgroups each rank counts from 0, so the index gives no order.
    return sorted(merged, key=lambda gpu: (gpu.pci, 0 if gpu.pci else gpu.index, gpu.slice, gpu.uuid))


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


# The division of a host's cores among its CPU workers, and of its GPUs among its ranks and their workers.


def near_cores(gpus: Iterable[Gpu]) -> frozenset[int]:
    """The cores near any of these GPUs; empty: unknown."""
    return frozenset().union(*(gpu.cpus for gpu in gpus))


@lru_cache  # hosts are alike, and masks are long
def intersection(near: frozenset[int], allowed: tuple[int, ...]) -> tuple[int, ...]:
    """The cores that are near and allowed."""
    return tuple(sorted(near.intersection(allowed)))


def share_cores(masks: Sequence[tuple[int, ...]], quota: float | None = None) -> list[int]:
    """Give each of a host's CPU workers a number of threads, from the cores that each may use (`masks`).

    A core that k workers may use counts for one k-th with each. So workers with cores of their own get all of them; and no
    worker less than one thread. `quota`: CPU time that all of them together may use, in cores; if the threads are more, all
    get fewer alike.

    >>> cores = tuple(range(8))
    >>> share_cores([cores, cores])
    [4, 4]
    >>> share_cores([(0, 1)] * 4)
    [1, 1, 1, 1]
    >>> share_cores([cores, cores], quota=5.0)
    [2, 2]
    """
    users: Counter[int] = Counter()
    for mask in masks:
        users.update(mask)
    # Together the shares are the cores that any of them may use.
    part = Fraction(1) if quota is None or not users else min(Fraction(1), Fraction(quota) / len(users))
    threads: dict[tuple[int, ...], int] = {}
    for mask in set(masks):
        sharers = Counter(users[core] for core in mask)
        threads[mask] = int(part * sum(Fraction(cores, number) for number, cores in sharers.items()))
    return [max(1, threads[mask]) for mask in masks]


def divide_gpus(
    host: str, ranks: Sequence[Inventory], gpus: Sequence[Gpu], each: int
) -> dict[int, list[tuple[Gpu, ...]]]:
    """Divide a host's GPUs among the ranks that take workers on it: for each rank the GPUs of each of its workers, perhaps none.

    The ranks are in order, the GPUs in that of the PCI bus; each that a rank sees is among them. Each worker gets `each`
    GPUs. A PlacementError if two ranks see some of the same GPUs, but not all; or if what a rank sees does not make full
    groups.
    """
    groups: dict[frozenset[str], list[Inventory]] = {}
    for rank in ranks:
        groups.setdefault(frozenset(gpu.uuid for gpu in rank.gpus), []).append(rank)
    if sum(len(seen) for seen in groups) != len(frozenset().union(*groups)):
        raise PlacementError(
            f"host {host}: ranks see overlapping but different GPUs: {_visible(groups)}",
            expected="the same GPUs for every rank of a host, as with --gpus-per-node, or different ones for each",
        )
    divided: dict[int, list[tuple[Gpu, ...]]] = {rank.rank: [] for rank in ranks}
    for seen, members in groups.items():
        mine = [gpu for gpu in gpus if gpu.uuid in seen]
        _check_groups(host, members, mine, each)
        sets = group_gpus(mine, each)
        for together, place in zip(sets, _places(list(map(near_cores, sets)), members), strict=True):
            divided[members[place].rank].append(together)
    return divided


def group_gpus(gpus: Sequence[Gpu], each: int) -> list[tuple[Gpu, ...]]:
    """Put GPUs into groups of `each`: those of one NUMA node together, then what the nodes have left.

    The result is in the order of their first GPUs.

    >>> gpus = [Gpu(str(i), i, "A100", 0, cpus=(0, 1) if i in (0, 1, 3) else (2, 3)) for i in range(4)]
    >>> [[gpu.index for gpu in group] for group in group_gpus(gpus, 2)]
    [[0, 1], [2, 3]]
    """
    nodes = grouped(range(len(gpus)), lambda number: gpus[number].cpus)
    rest = sorted(number for node in nodes for number in node[len(node) // each * each :])
    full = [node[: len(node) // each * each] for node in nodes]
    sets = [part[i : i + each] for part in (*full, rest) for i in range(0, len(part), each)]
    return [tuple(gpus[number] for number in numbers) for numbers in sorted(sets)]


def _check_groups(host: str, ranks: Sequence[Inventory], gpus: Sequence[Gpu], each: int) -> None:
    """Refuse GPUs that can't be put into groups of `each`: no GPU stays without a worker silently."""
    if each == 1:
        return
    who = f"host {host}: {ranks_text(rank.rank for rank in ranks)} {'sees' if len(ranks) == 1 else 'see'}"
    if left := len(gpus) % each:
        raise PlacementError(
            f"{who} {len(gpus)} GPU(s), of which groups of {each} (gpus_per_worker, --gpus-per-worker) would leave {left} "
            "without a worker",
            expected=f"a multiple of {each}",
            fix=f"let the ranks of a host see all its GPUs, choose some with {VISIBLE_DEVICES}, or set another number",
        )
    # NVIDIA Multi-Instance GPU User Guide, "CUDA Device Enumeration"
    slices = [gpu for gpu in gpus if gpu.parent]
    if slices:
        raise PlacementError(
            f"{who} the MIG instance {slices[0].uuid}, and CUDA shows a process one MIG instance at most",
            fix=f"gpus_per_worker=1 (--gpus-per-worker 1) instead of {each}, or whole GPUs",
        )


def _visible(groups: dict[frozenset[str], list[Inventory]]) -> str:
    """What each group of ranks sees, for a message."""
    parts = []
    for ranks in groups.values():
        first = ranks[0]
        gpus = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in first.gpus) or "none"
        variable = "unset" if first.visible is None else f"={first.visible!r}"
        parts.append(
            f"{ranks_text(rank.rank for rank in ranks)} saw GPU{'' if len(first.gpus) == 1 else 's'} {gpus} "
            f"[{VISIBLE_DEVICES} {variable}]"
        )
    return "; ".join(parts)


def _places(cores: Sequence[frozenset[int]], ranks: Sequence[Inventory]) -> list[int]:
    """Choose for each GPU (or group) near these cores the place of a rank: sizes differ by at most one, nearest first."""
    share, extra = divmod(len(cores), len(ranks))
    if len({rank.cpus for rank in ranks}) == 1 or not any(cores):
        sizes = (share + (place < extra) for place in range(len(ranks)))
        return [place for place, size in enumerate(sizes) for _ in range(size)]

    near = [_by_nearness(close, ranks) for close in cores]
    anywhere = [range(len(ranks))] * len(cores)
    # Those with the fewest places near them choose first.
    order = sorted(range(len(cores)), key=lambda number: len(near[number]))
    chosen: dict[int, int] = {}
    counts: Counter[int] = Counter()
    # `extra` ranks may have one more than `share`; once so many do (`larger`), all others stop at `share`.
    # First near ranks are filled up to their share, then `extra` of them with one more, then the others alike.
    for places, most in ((near, share), (near, share + 1), (anywhere, share), (anywhere, share + 1)):
        for number in order:
            if number in chosen:
                continue
            larger = sum(count > share for count in counts.values())
            room = most if larger < extra else share
            place = next((place for place in places[number] if counts[place] < room), None)
            if place is not None:
                chosen[number] = place
                counts[place] += 1
    return [chosen[number] for number in range(len(cores))]


def _by_nearness(close: frozenset[int], ranks: Sequence[Inventory]) -> list[int]:
    """Give the places of the ranks with some of these cores, those with the larger part of theirs first."""
    parts = [len(close.intersection(rank.cpus)) / max(1, len(rank.cpus)) for rank in ranks]
    return sorted(
        (place for place, part in enumerate(parts) if part > 0), key=lambda place: (-parts[place], place)
    )


def scheduler_gpu(rank: Inventory, workers: Sequence[WorkerPlan]) -> tuple[str, list[Problem]]:
    """The GPU that the scheduler's process sees, empty if there is none, and a warning then.

    Dask's scheduler unpickles graphs, and those of cuDF hold objects of a GPU. It makes a CUDA context when the first such
    graph comes. A GPU without a worker is the best, then one that nobody else uses, then the first.
    """
    busy = {device for worker in workers for device in worker.devices}
    where = f"the scheduler (rank {rank.rank} on {rank.host})"
    effect = "graphs that hold GPU objects, as those of cuDF do, fail there"
    if not rank.gpus:
        fix = "choose a rank that sees a GPU with scheduler_rank (--scheduler-rank)"
        return "", [Problem(f"{where} sees no GPU: {effect}", fix=fix)]
    usable = [gpu for gpu in rank.gpus if not (gpu.exclusive and (gpu.uuid in busy or gpu.processes))]
    if not usable:
        fix = "set the GPUs to the default compute mode (nvidia-smi -c 0), or leave one without a worker"
        found = f"{where} has no GPU, as one process alone may use each (compute mode): {effect}"
        return "", [Problem(found, fix=fix)]
    return min(usable, key=lambda gpu: (gpu.uuid in busy, bool(gpu.processes))).uuid, []
