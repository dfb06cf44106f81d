"""A plan for people: a node as a box of the picture or an entry of the table. Many nodes that look alike share one."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dask_gpu_mpi.base.tables import MANY_NODES, share_entries, styled, table, widths_of
from dask_gpu_mpi.base.text import counted, fold_names, fold_numbers, format_bytes, listed, ranks_text
from dask_gpu_mpi.machine.gpus import Gpu, near
from dask_gpu_mpi.plan.model import HostPlan, Plan, WorkerPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Many nodes have the same sets of cores.
_cores, _near = functools.lru_cache(fold_numbers), functools.lru_cache(near)
#: Boxes of a plan of many nodes; the other nodes are named together.
MOST_BOXES = 16
#: Nodes with something to warn of that have a box of their own in such a plan.
MOST_WARNED = 8
#: CPU workers of a node with a box of their own.
MOST_CPU_WORKERS = 8


@dataclass(frozen=True)
class WorkerBox:
    """A worker, or several on CPUs that are alike."""

    name: str
    kind: str
    threads: str
    memory: str
    cores: str
    #: How many there are.
    number: int = 1
    #: The number of this device among the worker's, if it has several.
    device: int | None = None

    @property
    def label(self) -> str:
        """The title of its box."""
        if self.number > 1:
            return f"{self.number} workers: {self.name}"
        return f"worker {self.name}" if self.device is None else f"{self.name}, device {self.device}"


@dataclass(frozen=True)
class GpuBox:
    """A GPU of a node and the worker that sees it."""

    #: With its place in `HostPlan.gpus`, which is the number in the worker's name.
    label: str
    product: str
    memory: str
    #: The cores near it: those of a NUMA domain. Empty: unknown.
    cores: str
    #: None: the GPU is idle.
    worker: WorkerBox | None
    #: Memory that other processes use; empty: none.
    in_use: str
    #: UUID and index, which differ between nodes that look alike.
    identity: str = field(compare=False)


@dataclass(frozen=True)
class NodeBox:
    """A node, or several that are alike. Nodes whose boxes are equal may share one."""

    hosts: tuple[str, ...] = field(compare=False)
    ranks: tuple[int, ...] = field(compare=False)
    #: "scheduler", "client".
    roles: tuple[str, ...] = field(compare=False)
    #: Problems of the node as a whole.
    alarms: tuple[str, ...] = field(compare=False)
    memory: str
    gpus: tuple[GpuBox, ...]
    cpu_workers: tuple[WorkerBox, ...]
    #: Ranks that start no worker although they take workers, counted from the first one of the node.
    without_worker: tuple[int, ...]
    #: Whether all ranks of the node are reserved for scheduler and client.
    reserved: bool

    @property
    def title(self) -> str:
        """Its name; of several nodes their number and names."""
        names = fold_names(self.hosts)
        return names if len(self.hosts) == 1 else f"{len(self.hosts)} × {names}"

    @property
    def subtitle(self) -> str:
        """Ranks, memory and GPUs."""
        each = "" if len(self.hosts) == 1 else "each "
        return f"{ranks_text(self.ranks)} · {each}{self.memory}, {counted(len(self.gpus), 'GPU')}"

    @property
    def is_red(self) -> bool:
        """Whether it has a problem."""
        return bool(self.alarms) or any(gpu.worker is None or gpu.in_use for gpu in self.gpus)


def node_boxes(plan: Plan) -> tuple[list[NodeBox], tuple[str, ...]]:
    """The boxes of a plan, in the order of its nodes, and the names of nodes that have none.

    Up to `MANY_NODES` nodes have a box each. Of more, those with the scheduler or the client have one, and so have those with
    something to warn of, if they are not many; of the others those share a box that would look alike.
    """
    view = _View(plan)
    few = len(plan.hosts) <= MANY_NODES
    single = [view.box([host], alike=not few) for host in plan.hosts]
    warned = sum(box.is_red for box in single)

    def look(number: int) -> Hashable:
        box = single[number]
        own = few or box.roles or (box.is_red and warned <= MOST_WARNED)
        return number if own else (box.is_red, box)

    boxes = []
    for numbers in share_entries(range(len(plan.hosts)), look):
        box = view.box([plan.hosts[number] for number in numbers], alike=len(numbers) > 1)
        boxes.append(replace(box, cpu_workers=_fold_workers(box.cpu_workers)))
    if len(boxes) <= MOST_BOXES or few:
        return boxes, ()
    by_weight = sorted(boxes, key=lambda box: (not box.roles, not box.is_red, -len(box.hosts)))
    left_out = {id(box) for box in by_weight[MOST_BOXES:]}
    names = tuple(name for box in boxes if id(box) in left_out for name in box.hosts)
    return [box for box in boxes if id(box) not in left_out], names


class _View:
    """A plan, by host."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.workers: dict[str, list[WorkerPlan]] = {host.host: [] for host in plan.hosts}
        for worker in plan.workers:
            self.workers[worker.host].append(worker)
        self.warnings: dict[str, list[int]] = {}
        for number, warning in enumerate(plan.warnings, start=1):
            for name in warning.hosts:
                self.warnings.setdefault(name, []).append(number)

    def roles(self, host: HostPlan) -> tuple[str, ...]:
        found = (("scheduler", self.plan.scheduler), ("client", self.plan.client))
        return tuple(name for name, role in found if role.rank in host.ranks)

    def box(self, hosts: Sequence[HostPlan], *, alike: bool) -> NodeBox:
        """The box of hosts that are alike; `alike`: without names, ranks and UUIDs, by which they differ."""
        host = hosts[0]
        first = host.ranks[0]
        workers = self.workers[host.host]
        plan = self.plan
        reserved = {plan.scheduler.rank, plan.client.rank} if plan.layout == "exclusive" else set()
        working = set(host.ranks) - reserved
        boxes = {worker.name: _worker_box(worker, first if alike else None) for worker in workers}
        of_gpu = {
            uuid: replace(boxes[worker.name], device=number if len(worker.devices) > 1 else None)
            for worker in workers
            for number, uuid in enumerate(worker.devices)
        }
        idle = [rank - first for rank in sorted(working - {worker.rank for worker in workers})]
        alarms = []
        if idle:
            ranks = [each.ranks[0] + offset for each in hosts for offset in idle]
            alarms.append(f"no worker: {ranks_text(ranks)}")
        if numbers := {number for each in hosts for number in self.warnings.get(each.host, ())}:
            alarms.append(f"see warning{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}")
        return NodeBox(
            hosts=tuple(each.host for each in hosts),
            ranks=tuple(rank for each in hosts for rank in each.ranks),
            roles=self.roles(host),
            alarms=tuple(alarms),
            memory=_short(host.memory) if host.memory else "memory unknown",
            gpus=tuple(
                _gpu_box(place, gpu, of_gpu.get(gpu.uuid), alike) for place, gpu in enumerate(host.gpus)
            ),
            cpu_workers=tuple(boxes[worker.name] for worker in workers if worker.gpu_index is None),
            without_worker=tuple(idle),
            reserved=not working,
        )

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
                _near(worker.cpus, worker.numa, worker.nics) or "-",
            )
            for worker, other in zip(first, last, strict=True)
        ]

    def troubles(self, hosts: Sequence[HostPlan]) -> Iterator[str]:
        """The GPUs of an entry that nobody uses, and those that others use."""
        idle: list[str] = []
        busy: list[str] = []
        for host in hosts:
            devices = {device for worker in self.workers[host.host] for device in worker.devices}
            if numbers := [number for number, gpu in enumerate(host.gpus) if gpu.uuid not in devices]:
                idle.append(f"GPU {fold_numbers(numbers)} of {host.host}")
            if numbers := [number for number, gpu in enumerate(host.gpus) if gpu.processes]:
                busy.append(f"GPU {fold_numbers(numbers)} of {host.host}")
        if idle:
            yield f"without a worker: {listed(idle)}"
        if busy:
            yield f"in use by others: {listed(busy)}"


def _gpu_box(place: int, gpu: Gpu, worker: WorkerBox | None, alike: bool) -> GpuBox:
    in_use = ""
    if gpu.processes:
        in_use = "in use by others" if alike or gpu.busy is None else f"{_short(gpu.busy)} used by others"
    part = f" MIG {gpu.slice}" if gpu.slice >= 0 else ""
    return GpuBox(
        label=f"GPU {place}{part}",
        product=gpu.name,
        memory=_short(gpu.memory) if gpu.memory else "",
        cores=_cores(gpu.cpus),
        worker=worker,
        in_use=in_use,
        identity="" if alike else f"{gpu.uuid}, NVML index {gpu.index}",
    )


def _worker_box(worker: WorkerPlan, first: int | None) -> WorkerBox:
    """The box of a worker; with the `first` rank of its host its name counts from that."""
    return WorkerBox(
        name=str(worker.name) if first is None else _pattern(worker, first),
        kind=worker.kind,
        threads=counted(worker.nthreads, "thread"),
        memory=_short(worker.memory_limit) if worker.memory_limit else "unlimited",
        cores=f"cores {_near(worker.cpus, worker.numa, worker.nics)}" if worker.cpus else "",
    )


def _pattern(worker: WorkerPlan, first: int) -> str:
    """A worker's name as it is on all hosts that look alike: ``<rank>-0``, and ``<rank+1>-2`` for a second rank."""
    name = str(worker.name)
    added = re.search(r"-cpu-\d+$", name)
    end = f"-{worker.gpu_index}" if worker.gpu_index is not None else added[0] if added else ""
    offset = f"+{worker.rank - first}" if worker.rank > first else ""
    return f"{name.removesuffix(end).removesuffix(str(worker.rank))}<rank{offset}>{end}"


def _fold_workers(boxes: tuple[WorkerBox, ...]) -> tuple[WorkerBox, ...]:
    if len(boxes) <= MOST_CPU_WORKERS:
        return boxes
    return tuple(map(_one_of, share_entries(boxes, lambda box: (box.threads, box.memory))))


def _one_of(boxes: Sequence[WorkerBox]) -> WorkerBox:
    if len(boxes) == 1:
        return boxes[0]
    cores = {box.cores for box in boxes}
    return replace(
        boxes[0],
        name=f"{boxes[0].name} … {boxes[-1].name}",
        cores=cores.pop() if len(cores) == 1 else "each its own cores",
        number=len(boxes),
    )


def _short(size: int) -> str:
    """Bytes with three digits: nodes of one kind differ in more."""
    number, unit = format_bytes(size).split()
    value = float(number)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


HEADER = ("worker", "rank", "device", "threads", "memory", "cores")
#: Those of them that are numbers.
NUMBERS = ("rank", "threads", "memory")
_ROLES = {"scheduler": "bold blue", "client": "bold magenta"}
_RED = "bold red"


def display(plan: Plan, *, terminal: bool = False) -> Iterator[RenderableType]:
    """The plan as lines and tables: roles, then each node with its workers, then the warnings.

    `terminal`: what is to be warned of is marked as well.
    """
    view = _View(plan)
    ranks, hosts = counted(plan.world_size, "rank"), counted(len(plan.hosts), "host")
    first = f"layout {plan.layout}: {ranks} on {hosts}, {counted(len(plan.workers), 'worker')}"
    yield styled(plan.summary if terminal else first, "bold")
    text = styled(plan.roles)
    for role, style in _ROLES.items():
        text.highlight_words([role], style)
    yield text
    entries = [[host] for host in plan.hosts]
    if len(entries) > MANY_NODES:
        entries = share_entries(plan.hosts, lambda host: view.box([host], alike=True))
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
