"""What the picture of a plan shows of each node; many nodes that would look alike share a box."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from dask_gpu_mpi.base.hostlist import counted, fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.base.text import format_bytes
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.plan.model import HostPlan, Planned, WorkerPlan
from dask_gpu_mpi.plan.table import MANY_HOSTS

__all__ = ["DomainBox", "GpuBox", "NodeBox", "WorkerBox", "node_boxes", "roles", "summary"]

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
    #: Which of the worker's devices this is, where it has several.
    device: int | None = None

    @property
    def label(self) -> str:
        """What its box is headed."""
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
    #: None: the GPU is idle.
    worker: WorkerBox | None
    #: What other processes hold; empty: nothing.
    in_use: str
    #: What tells it from those of other nodes.
    identity: str = field(compare=False)


@dataclass(frozen=True)
class DomainBox:
    """The GPUs near the same cores, which is a NUMA domain."""

    #: Empty: unknown.
    cores: str
    gpus: tuple[GpuBox, ...]


@dataclass(frozen=True)
class _Content:
    """What must be equal for two nodes to share a box."""

    memory: str
    gpus: int
    domains: tuple[DomainBox, ...]
    cpu_workers: tuple[WorkerBox, ...]
    #: Ranks that start no worker although they take workers, counted from the first one of the node.
    without_worker: tuple[int, ...]
    #: Whether all ranks of the node are reserved for scheduler and client.
    reserved: bool

    @property
    def is_red(self) -> bool:
        found = [gpu for domain in self.domains for gpu in domain.gpus]
        return bool(self.without_worker) or any(gpu.worker is None or gpu.in_use for gpu in found)


@dataclass(frozen=True)
class NodeBox:
    """A node, or several that are alike."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    #: "scheduler", "client".
    roles: tuple[str, ...]
    #: What is wrong with the node as a whole.
    alarms: tuple[str, ...]
    content: _Content

    @property
    def title(self) -> str:
        """Its name; of several nodes their number and names."""
        names = fold_names(self.hosts)
        return names if len(self.hosts) == 1 else f"{len(self.hosts)} × {names}"

    @property
    def subtitle(self) -> str:
        """Ranks, memory and GPUs."""
        each = "" if len(self.hosts) == 1 else "each "
        return f"{ranks_text(self.ranks)} · {each}{self.content.memory}, {counted(self.content.gpus, 'GPU')}"

    @property
    def is_red(self) -> bool:
        """Whether there is something to warn of."""
        return bool(self.alarms) or self.content.is_red


def summary(plan: Planned) -> str:
    """The plan in one line."""
    gpus = sum(len(host.gpus) for host in plan.hosts)
    return ", ".join(
        [
            counted(len(plan.hosts), "node"),
            counted(gpus, "GPU"),
            counted(len(plan.workers), "worker"),
            counted(plan.world_size, "rank"),
            f"layout {plan.layout}",
        ]
    )


def roles(plan: Planned) -> str:
    """Where scheduler and client are."""
    return (
        f"scheduler: rank {plan.scheduler.rank} on {plan.scheduler.host}; "
        f"client: rank {plan.client.rank} on {plan.client.host}"
    )


def node_boxes(plan: Planned) -> tuple[list[NodeBox], tuple[str, ...]]:
    """The boxes of a plan, in the order of its nodes, and the names of nodes that have none.

    Up to `MANY_HOSTS` nodes have a box each. Of more, those with the scheduler or the client have one, and so have those with
    something to warn of, if they are not many; of the others those share a box that would look alike.
    """
    view = _View(plan)
    few = len(plan.hosts) <= MANY_HOSTS
    contents = [view.content(host, alike=not few) for host in plan.hosts]
    red = [
        content.is_red or bool(view.warnings_of(host))
        for host, content in zip(plan.hosts, contents, strict=True)
    ]
    groups: dict[Hashable, list[HostPlan]] = {}
    for number, host in enumerate(plan.hosts):
        own = few or view.roles(host) or (red[number] and sum(red) <= MOST_WARNED)
        groups.setdefault(number if own else (red[number], contents[number]), []).append(host)
    boxes = [view.box(hosts) for hosts in groups.values()]
    if len(boxes) <= MOST_BOXES or few:
        return boxes, ()
    by_weight = sorted(boxes, key=lambda box: (not box.roles, not box.is_red, -len(box.hosts)))
    left_out = {id(box) for box in by_weight[MOST_BOXES:]}
    names = tuple(name for box in boxes if id(box) in left_out for name in box.hosts)
    return [box for box in boxes if id(box) not in left_out], names


class _View:
    """A plan, by host."""

    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        self.workers: dict[str, list[WorkerPlan]] = {host.host: [] for host in plan.hosts}
        for worker in plan.workers:
            self.workers[worker.host].append(worker)
        self.warnings: dict[str, list[int]] = {}
        for number, warning in enumerate(plan.warnings, start=1):
            for name in warning.hosts:
                self.warnings.setdefault(name, []).append(number)

    def warnings_of(self, host: HostPlan) -> list[int]:
        return self.warnings.get(host.host, [])

    def roles(self, host: HostPlan) -> tuple[str, ...]:
        found = (("scheduler", self.plan.scheduler), ("client", self.plan.client))
        return tuple(name for name, role in found if role.rank in host.ranks)

    def box(self, hosts: Sequence[HostPlan]) -> NodeBox:
        first = hosts[0]
        content = self.content(first, alike=len(hosts) > 1)
        alarms = []
        if content.without_worker:
            idle = [host.ranks[0] + offset for host in hosts for offset in content.without_worker]
            alarms.append(f"no worker: {ranks_text(idle)}")
        if numbers := sorted({number for host in hosts for number in self.warnings_of(host)}):
            alarms.append(f"see warning{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}")
        return NodeBox(
            hosts=tuple(host.host for host in hosts),
            ranks=tuple(rank for host in hosts for rank in host.ranks),
            roles=self.roles(first),
            alarms=tuple(alarms),
            content=content,
        )

    def content(self, host: HostPlan, *, alike: bool) -> _Content:
        """What is shown of a host; `alike`: without what differs between hosts that are alike."""
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
        domains: dict[tuple[int, ...], list[GpuBox]] = {}
        for place, gpu in enumerate(host.gpus):
            box = _gpu_box(place, gpu, of_gpu.get(gpu.uuid), alike)
            domains.setdefault(gpu.cpus, []).append(box)
        return _Content(
            memory=_short(host.memory) if host.memory else "memory unknown",
            gpus=len(host.gpus),
            domains=tuple(DomainBox(fold_numbers(cpus), tuple(gpus)) for cpus, gpus in domains.items()),
            cpu_workers=_fold_workers([boxes[w.name] for w in workers if w.gpu_index is None]),
            without_worker=tuple(
                rank - first for rank in sorted(working - {worker.rank for worker in workers})
            ),
            reserved=not working,
        )


def _gpu_box(place: int, gpu: Gpu, worker: WorkerBox | None, alike: bool) -> GpuBox:
    in_use = ""
    if gpu.processes:
        in_use = "in use by others" if alike or gpu.busy is None else f"{_short(gpu.busy)} used by others"
    part = f" MIG {gpu.slice}" if gpu.slice >= 0 else ""
    return GpuBox(
        label=f"GPU {place}{part}",
        product=gpu.name,
        memory=_short(gpu.memory) if gpu.memory else "",
        worker=worker,
        in_use=in_use,
        identity="" if alike else f"{gpu.uuid}, NVML index {gpu.index}",
    )


def _worker_box(worker: WorkerPlan, first: int | None) -> WorkerBox:
    """`first`: the first rank of its host, from which its own is counted instead of being named."""
    return WorkerBox(
        name=str(worker.name) if first is None else _pattern(worker, first),
        kind=worker.kind,
        threads=counted(worker.nthreads, "thread"),
        memory=_short(worker.memory_limit) if worker.memory_limit else "unlimited",
        cores=f"cores {fold_numbers(worker.cpus)}" if worker.cpus else "",
    )


def _pattern(worker: WorkerPlan, first: int) -> str:
    """A worker's name, which is the same on hosts that are alike: ``<rank>-0``, and with a second rank ``<rank+1>-2``."""
    name = str(worker.name)
    added = re.search(r"-cpu-\d+$", name)
    end = f"-{worker.gpu_index}" if worker.gpu_index is not None else added[0] if added else ""
    offset = f"+{worker.rank - first}" if worker.rank > first else ""
    return f"{name.removesuffix(end).removesuffix(str(worker.rank))}<rank{offset}>{end}"


def _fold_workers(boxes: Sequence[WorkerBox]) -> tuple[WorkerBox, ...]:
    if len(boxes) <= MOST_CPU_WORKERS:
        return tuple(boxes)
    groups: dict[Hashable, list[WorkerBox]] = {}
    for box in boxes:
        groups.setdefault((box.threads, box.memory), []).append(box)
    return tuple(_one_of(group) for group in groups.values())


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
