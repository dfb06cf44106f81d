"""Dividing the GPUs of a host among its ranks and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

from dask_gpu_mpi.base.text import grouped, ranks_text
from dask_gpu_mpi.errors import PlacementError, Problem
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.plan.model import WorkerPlan

# Sharing the cores of a host between its workers.


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

    The ranks are in order, the GPUs in the order of their index; each that a rank sees is among them. Each worker gets `each`
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
    for places, most in ((near, share), (near, share + 1), (anywhere, share), (anywhere, share + 1)):
        for number in order:
            larger = sum(count > share for count in counts.values())
            room = most if larger < extra else share
            place = next((place for place in places[number] if counts[place] < room), None)
            if number not in chosen and place is not None:
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
