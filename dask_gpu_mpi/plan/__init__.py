"""From inventories and options to the plan, the work of every rank: its data here, and pure functions that make and show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dask_gpu_mpi.base.text import counted, plain_text
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine import NO_PROMISE, Gpu, Promise
from dask_gpu_mpi.options.model import Transport


@dataclass(frozen=True)
class Role:
    """The rank, and its host, that has a role."""

    rank: int
    host: str


@dataclass(frozen=True)
class HostPlan:
    """One host of the job."""

    #: Two hosts of one name are told apart as ``h`` and ``h#2``.
    host: str
    #: The ranks on it.
    ranks: tuple[int, ...]
    #: The GPUs that the job may use on it, in the order of PCI bus (index, if unknown) and slice: the place here is the
    #: `gpu_index` in worker names.
    gpus: tuple[Gpu, ...]
    #: Bytes that the job may use on it: the smallest number that its ranks report. 0: unknown.
    memory: int
    #: CPU time that its ranks may use, in cores: the smallest quota that they report. None: no quota.
    cpu_quota: float | None = None
    #: The GPUs that the job should see on it.
    promise: Promise = NO_PROMISE


@dataclass(frozen=True)
class WorkerPlan:
    """One worker."""

    #: ``<rank>-<gpu_index>`` on a GPU, the rank itself (an int, as in dask-mpi) in a job without GPUs, ``<rank>-cpu-<i>`` for
    #: additional CPU workers; with a prefix ``<prefix>-`` before.
    name: str | int
    #: Where it is started.
    rank: int
    host: str
    kind: Literal["gpu", "cpu"]
    #: The GPU's place in `HostPlan.gpus`; of several, the first's.
    gpu_index: int | None
    #: UUID of the GPU it sees; of several GPUs, joined by commas: its ``CUDA_VISIBLE_DEVICES``.
    device: str | None
    nthreads: int
    #: Bytes; 0: no limit.
    memory_limit: int
    #: Cores it may use.
    cpus: tuple[int, ...]
    #: Dask resources: ``GPU=<its GPUs>``, or ``CPU=<nthreads>``.
    resources: dict[str, float]
    #: Bytes of its first GPU, and those that were free before the job; 0 and -1: unknown, or it has no GPU.
    device_memory: int = 0
    device_free: int = -1
    #: The NUMA node whose memory it prefers, that of its GPUs; None: not known, they have several, or it has no GPU.
    numa: int | None = None
    #: The InfiniBand ports near its GPUs, which UCX uses between nodes unless the user has chosen others; empty: all.
    nics: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs it sees; its device 0 comes first."""
        return tuple(self.device.split(",")) if self.device else ()


@dataclass(frozen=True)
class Plan:
    """The work of every rank.

    Attributes
    ----------
    layout : str
        "shared" or "exclusive".
    world_size : int
        Number of ranks.
    scheduler, client : Role
        The ranks with these roles. Without a script the client's rank only reports that the cluster is up.
    hosts : tuple of HostPlan
        In the order of their lowest ranks.
    workers : tuple of WorkerPlan
        In the order of ranks; of one rank GPU workers first.
    warnings : tuple of Problem
        What is unusual; each is one line when it is printed.
    scheduler_device : str
        UUID of the GPU that the scheduler's process sees, empty if none: it unpickles graphs, and those of cuDF hold GPU objects.
    """

    layout: str
    world_size: int
    scheduler: Role
    client: Role
    hosts: tuple[HostPlan, ...]
    workers: tuple[WorkerPlan, ...]
    warnings: tuple[Problem, ...] = ()
    scheduler_device: str = ""

    def __repr__(self) -> str:
        warnings = f"; {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return f"<Plan: {self.summary}; {self.roles}{warnings}>"

    @property
    def summary(self) -> str:
        """The plan in one line."""
        gpus = sum(len(host.gpus) for host in self.hosts)
        numbers = {"node": len(self.hosts), "GPU": gpus, "worker": len(self.workers), "rank": self.world_size}
        return ", ".join(
            [*(counted(number, what) for what, number in numbers.items()), f"layout {self.layout}"]
        )

    @property
    def roles(self) -> str:
        """The ranks and hosts of scheduler and client, in one line."""
        return (
            f"scheduler: rank {self.scheduler.rank} on {self.scheduler.host}; "
            f"client: rank {self.client.rank} on {self.client.host}"
        )

    @cached_property
    def _by_rank(self) -> Mapping[int, tuple[WorkerPlan, ...]]:
        found: dict[int, list[WorkerPlan]] = {}
        for worker in self.workers:
            found.setdefault(worker.rank, []).append(worker)
        return {rank: tuple(workers) for rank, workers in found.items()}

    def for_rank(self, rank: int) -> tuple[WorkerPlan, ...]:
        """The workers that one rank starts."""
        return self._by_rank.get(rank, ())

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, in the schema of ``plan --json``; memory in bytes."""
        return {
            "layout": self.layout,
            "world_size": self.world_size,
            "scheduler": {**vars(self.scheduler), "device": self.scheduler_device},
            "client": dict(vars(self.client)),
            "hosts": [
                {
                    "host": host.host,
                    "ranks": list(host.ranks),
                    "gpus": [
                        {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory": gpu.memory}
                        for gpu in host.gpus
                    ],
                    "memory": host.memory,
                }
                for host in self.hosts
            ],
            "workers": [
                {**vars(worker), "cpus": list(worker.cpus), "resources": dict(worker.resources)}
                for worker in self.workers
            ],
            "warnings": [str(warning) for warning in self.warnings],
        }

    def table(self) -> str:
        """The plan for people: roles, then each host with its workers, then the warnings."""
        from dask_gpu_mpi.plan.nodes import display

        return plain_text(display(self))

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        from dask_gpu_mpi.plan.nodes import svg

        return svg(self)


@dataclass(frozen=True)
class Start:
    """A rank's part of the plan, and how to reach the scheduler."""

    #: The scheduler's.
    address: str
    #: ``"tls"`` or ``"tcp"``.
    protocol: str
    #: Address for this rank's workers; None: the one that leads to the scheduler.
    listen: str | None
    #: This rank's.
    workers: tuple[WorkerPlan, ...]
    #: Dask configuration with the credentials.
    config: dict[str, Any] = field(repr=False)
    #: Whether the job uses GPUs of its node, which CPU workers must not touch.
    beside_gpus: bool = False
    #: Whether the script runs here.
    is_client: bool = False
    #: Seconds for which it holds back its workers, so that not all connect at once.
    delay: float = 0.0
    #: Seconds that all workers may take from now, where the start-up deadline grows with their number; 0: it does not.
    limit: float = 0.0
    #: What the workers send each other over UCX.
    transport: Transport = field(default_factory=Transport)
    #: Modules that workers with a GPU import as the script begins; from their agent.
    imports: tuple[str, ...] = ()
    #: Where the scheduler runs, for an error, if this rank is to connect to it before it starts workers; empty: it is not.
    scheduler: str = ""
