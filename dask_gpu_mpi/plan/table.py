"""The hosts of a plan as a table for people; hosts that are alike share an entry where there are many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dask_gpu_mpi.base.text import counted, fold_names, fold_numbers, format_bytes, ranks_text
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.plan.model import HostPlan, WorkerPlan

__all__ = ["HEADER", "MANY_HOSTS", "NO_WORKER", "NUMERIC", "Block", "blocks", "host_blocks"]

MANY_HOSTS = 16
HEADER = ("worker", "rank", "device", "threads", "memory", "cores")
#: Which of them are numbers.
NUMERIC = (False, True, False, True, True, False)
NO_WORKER = "no worker"


@dataclass(frozen=True)
class Block:
    """The entry of a host, or of hosts that are alike."""

    hosts: tuple[HostPlan, ...]
    title: str
    #: A cell for each name in `HEADER`.
    rows: tuple[tuple[str, ...], ...]


def blocks(hosts: Sequence[HostPlan], workers: Sequence[WorkerPlan]) -> list[Block]:
    """The entries of the table, one for each host or, of many hosts, for each kind of host."""
    by_host: dict[str, list[WorkerPlan]] = {host.host: [] for host in hosts}
    for worker in workers:
        by_host[worker.host].append(worker)
    groups: dict[Hashable, list[HostPlan]] = {}
    for number, host in enumerate(hosts):
        key = _pattern(host, by_host[host.host]) if len(hosts) > MANY_HOSTS else number
        groups.setdefault(key, []).append(host)
    return [Block(tuple(alike), _title(alike), tuple(_rows(alike, by_host))) for alike in groups.values()]


def host_blocks(hosts: Sequence[HostPlan], workers: Sequence[WorkerPlan]) -> list[str]:
    """Each host with its workers, as aligned plain text: lines, an empty one before each host."""
    found = blocks(hosts, workers)
    widths = [
        max(len(row[i]) for block in found for row in (HEADER, *block.rows)) for i in range(len(HEADER))
    ]
    lines = []
    for block in found:
        lines += ["", block.title]
        lines += [_line(row, widths) for row in (HEADER, *block.rows)] if block.rows else [f"  {NO_WORKER}"]
    return lines


def _pattern(host: HostPlan, workers: Sequence[WorkerPlan]) -> Hashable:
    """What is equal for hosts that share an entry: all but names, UUIDs, and the first rank."""
    first = host.ranks[0]
    places = {gpu.uuid: place for place, gpu in enumerate(host.gpus)}
    return (
        tuple(rank - first for rank in host.ranks),
        host.memory,
        tuple((gpu.index, gpu.slice, gpu.name, gpu.memory) for gpu in host.gpus),
        tuple(
            (w.rank - first, w.kind, tuple(map(places.get, w.devices)), w.nthreads, w.memory_limit, w.cpus)
            for w in workers
        ),
    )


def _title(hosts: Sequence[HostPlan]) -> str:
    first, *others = hosts
    memory = format_bytes(first.memory) if first.memory else "memory unknown"
    gpus = counted(len(first.gpus), "GPU")
    if not others:
        return f"host {first.host}: {ranks_text(first.ranks)}, {memory}, {gpus}"
    ranks = ranks_text(rank for host in hosts for rank in host.ranks)
    return f"{len(hosts)} hosts {fold_names(host.host for host in hosts)}: {ranks}; on each {memory}, {gpus}"


def _rows(hosts: Sequence[HostPlan], by_host: dict[str, list[WorkerPlan]]) -> list[tuple[str, ...]]:
    first, last = by_host[hosts[0].host], by_host[hosts[-1].host]
    return [
        (
            _span(str(worker.name), str(other.name)),
            _span(str(worker.rank), str(other.rank)),
            _device(worker, hosts[0].gpus, alone=len(hosts) == 1),
            str(worker.nthreads),
            format_bytes(worker.memory_limit) if worker.memory_limit else "unlimited",
            fold_numbers(worker.cpus) or "-",
        )
        for worker, other in zip(first, last, strict=True)
    ]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


def _device(worker: WorkerPlan, gpus: Sequence[Gpu], *, alone: bool) -> str:
    if worker.gpu_index is None:
        return "-"
    gpu = gpus[worker.gpu_index]
    places = fold_numbers(place for place, other in enumerate(gpus) if other.uuid in worker.devices)
    # The (first) index is the one of the worker's name; the UUID differs between hosts that share an entry.
    return f"{places} {gpu.name}" + (f" {gpu.uuid[:12]}" if alone else "")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.rjust(width) if numeric else cell.ljust(width)
        for cell, width, numeric in zip(row, widths, NUMERIC, strict=True)
    )
    return f"  {'  '.join(cells)}".rstrip()
