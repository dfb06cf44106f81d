"""From inventories and options to the plan: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dask_gpu_mpi.base.text import counted, plain_text
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.plan.model import HostPlan, Role, WorkerPlan


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
        numbers = (
            (len(self.hosts), "node"),
            (gpus, "GPU"),
            (len(self.workers), "worker"),
            (self.world_size, "rank"),
        )
        return ", ".join([*(counted(number, what) for number, what in numbers), f"layout {self.layout}"])

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
