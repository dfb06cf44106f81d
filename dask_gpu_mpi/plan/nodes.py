"""A plan for people, by node: `Nodes` for its table and its picture, and the table. Many nodes that look alike share an entry."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from dask_gpu_mpi.base.tables import MANY_NODES, styled, table, widths_of
from dask_gpu_mpi.base.text import (
    counted,
    fold_names,
    fold_numbers,
    format_bytes,
    grouped,
    listed,
    ranks_text,
)
from dask_gpu_mpi.machine.gpus import Gpu, near
from dask_gpu_mpi.plan.model import HostPlan, PlanData, WorkerPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Many nodes have the same sets of cores.
_near = functools.lru_cache(near)


class Nodes:
    """A plan, by host."""

    def __init__(self, plan: PlanData) -> None:
        self.plan = plan
        self.workers: dict[str, list[WorkerPlan]] = {host.host: [] for host in plan.hosts}
        for worker in plan.workers:
            self.workers[worker.host].append(worker)

    def roles(self, host: HostPlan) -> list[str]:
        """``"scheduler"``, ``"client"``."""
        found = (("scheduler", self.plan.scheduler), ("client", self.plan.client))
        return [name for name, role in found if role.rank in host.ranks]

    def idle(self, host: HostPlan) -> list[int]:
        """The places of the GPUs without a worker."""
        devices = {device for worker in self.workers[host.host] for device in worker.devices}
        return [place for place, gpu in enumerate(host.gpus) if gpu.uuid not in devices]

    def busy(self, host: HostPlan) -> list[int]:
        """The places of the GPUs on which others hold memory."""
        return [place for place, gpu in enumerate(host.gpus) if gpu.processes]

    def look(self, host: HostPlan) -> Hashable:
        """All that a host's entry has but names, ranks and UUIDs, by which nodes that are alike differ."""
        workers = [
            (
                worker.rank - host.ranks[0],
                _device(worker, host.gpus, alone=False),
                worker.nthreads,
                short(worker.memory_limit),
                cores_of(worker),
            )
            for worker in self.workers[host.host]
        ]
        gpus = (len(host.gpus), *self.idle(host), "busy", *self.busy(host))
        return (len(host.ranks), short(host.memory), gpus, tuple(workers))

    def rows(self, hosts: Sequence[HostPlan]) -> list[tuple[str, ...]]:
        """The table of an entry: a cell for each name in `HEADER`."""
        first, last = self.workers[hosts[0].host], self.workers[hosts[-1].host]
        return [
            (
                _span(worker.name, other.name),
                _span(worker.rank, other.rank),
                _device(worker, hosts[0].gpus, alone=len(hosts) == 1),
                str(worker.nthreads),
                format_bytes(worker.memory_limit) if worker.memory_limit else "unlimited",
                cores_of(worker) or "-",
            )
            for worker, other in zip(first, last, strict=True)
        ]

    def troubles(self, hosts: Sequence[HostPlan]) -> Iterator[str]:
        """The GPUs of an entry that nobody uses, and those that others use."""
        for what, places_of in (("without a worker", self.idle), ("in use by others", self.busy)):
            found = [f"GPU {fold_numbers(places)} of {h.host}" for h in hosts if (places := places_of(h))]
            if found:
                yield f"{what}: {listed(found)}"


def short(size: int) -> str:
    """Bytes with three digits: nodes of one kind differ in more."""
    number, unit = format_bytes(size).split()
    value = float(number)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def cores_of(worker: WorkerPlan) -> str:
    """The cores that a worker may use; empty: unknown."""
    return _near(worker.cpus, worker.numa, worker.nics)


HEADER = ("worker", "rank", "device", "threads", "memory", "cores")
#: Those of them that are numbers.
NUMBERS = ("rank", "threads", "memory")
_ROLES = {"scheduler": "bold blue", "client": "bold magenta"}
_RED = "bold red"


def display(plan: PlanData, *, terminal: bool = False) -> Iterator[RenderableType]:
    """The plan as lines and tables: roles, then each node with its workers, then the warnings.

    `terminal`: what is to be warned of is marked as well.
    """
    view = Nodes(plan)
    ranks, hosts = counted(plan.world_size, "rank"), counted(len(plan.hosts), "host")
    first = f"layout {plan.layout}: {ranks} on {hosts}, {counted(len(plan.workers), 'worker')}"
    yield styled(plan.summary if terminal else first, "bold")
    text = styled(plan.roles)
    for role, style in _ROLES.items():
        text.highlight_words([role], style)
    yield text
    entries = [[host] for host in plan.hosts]
    if len(entries) > MANY_NODES:
        entries = grouped(plan.hosts, view.look)
    tables = [view.rows(entry) for entry in entries]
    widths = () if terminal else widths_of([HEADER, *(row for rows in tables for row in rows)])
    for entry, rows in zip(entries, tables, strict=True):
        yield ""
        title = styled(_title(entry), "bold")
        for role in {role: None for host in entry for role in view.roles(host)} if terminal else ():
            title.append("  ").append(role, _ROLES[role])
        yield title
        yield (
            table(HEADER, map(_coloured, rows), right=NUMBERS, widths=widths)
            if rows
            else styled("  no worker", "dim")
        )
        if terminal:
            yield from (styled(f"  {text}", _RED) for text in view.troubles(entry))
    if plan.warnings:
        yield ""
    for warning in plan.warnings:
        yield styled("warning", _RED).append(styled(f": {warning}", "red"))


def _title(hosts: Sequence[HostPlan]) -> str:
    first, *others = hosts
    memory = format_bytes(first.memory) if first.memory else "memory unknown"
    gpus = counted(len(first.gpus), "GPU")
    if not others:
        return f"host {first.host}: {ranks_text(first.ranks)}, {memory}, {gpus}"
    ranks = ranks_text(rank for host in hosts for rank in host.ranks)
    return f"{len(hosts)} hosts {fold_names(host.host for host in hosts)}: {ranks}; on each {memory}, {gpus}"


def _coloured(row: Sequence[str]) -> list[Text]:
    colour = "cyan" if row[HEADER.index("device")] == "-" else "green"
    return [
        styled(cell, colour if name in ("worker", "device") else "")
        for name, cell in zip(HEADER, row, strict=True)
    ]


def _span(first: object, last: object) -> str:
    return f"{first}" if first == last else f"{first} .. {last}"


def _device(worker: WorkerPlan, gpus: Sequence[Gpu], *, alone: bool) -> str:
    if worker.gpu_index is None:
        return "-"
    gpu = gpus[worker.gpu_index]
    places = fold_numbers(place for place, other in enumerate(gpus) if other.uuid in worker.devices)
    # The first place is the one of the worker's name; the UUID differs between nodes that share an entry.
    return f"{places} {gpu.name}" + (f" {gpu.uuid[:12]}" if alone else "")
