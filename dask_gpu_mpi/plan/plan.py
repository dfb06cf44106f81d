"""The plan: the work of every rank. Plain data, as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dask_gpu_mpi.base.tables import text_of
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.plan.model import PlanData, WorkerPlan
from dask_gpu_mpi.plan.nodes import display, roles, summary


class Plan(PlanData):
    """The work of every rank; made by `dask_gpu_mpi.plan.planner.make_plan`.

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
    warnings : tuple of str
        What the user should know, each one line.
    scheduler_device : str
        UUID of the GPU that the scheduler's process sees, empty if none: it unpickles graphs, and those of cuDF hold GPU objects.
    """

    @cached_property
    def _by_rank(self) -> Mapping[int, tuple[WorkerPlan, ...]]:
        found: dict[int, list[WorkerPlan]] = {}
        for worker in self.workers:
            found.setdefault(worker.rank, []).append(worker)
        return {rank: tuple(workers) for rank, workers in found.items()}

    def __repr__(self) -> str:
        warnings = f"; {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return f"<Plan: {summary(self)}; {roles(self)}{warnings}>"

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        from dask_gpu_mpi.plan.picture import svg

        return svg(self)

    def __getstate__(self) -> dict[str, Any]:
        # The index is made again after the transfer: it would double what is sent.
        return {key: value for key, value in self.__dict__.items() if key != "_by_rank"}

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
                {
                    **vars(worker),
                    "cpus": list(worker.cpus),
                    "resources": dict(worker.resources),
                    "device_sizes": dict(worker.device_sizes),
                }
                for worker in self.workers
            ],
            "warnings": list(self.warnings),
        }

    def table(self) -> str:
        """The plan for people: roles, then each host with its workers, then the warnings."""
        return text_of(display(self))
