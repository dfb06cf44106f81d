"""Tasks that request no worker and no resource run on the GPU workers (the option `default_workers`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin


class GpuByDefault(SchedulerPlugin):
    """Restricts tasks without restrictions to the workers that have the resource ``GPU``.

    The tasks share one set of addresses, which changes as workers come and go: a waiting task is never bound to workers that
    have gone. (A restriction to the resource would do the same, but a shuffle by P2P chooses the workers of its output by
    addresses alone.) Before the first GPU worker has come, tasks run anywhere.
    """

    name = "dask_gpu_mpi-gpu-by-default"

    def __init__(self) -> None:
        #: Addresses of the GPU workers. Once there was one, the set is never empty, since to Dask that means no restriction:
        #: the last address stays, and tasks wait until its nanny has restarted it.
        self.addresses: set[str] = set()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by distributed before it looks for tasks that waited for this worker."""
        if scheduler.workers[worker].resources.get("GPU"):
            self.addresses.add(worker)
            if len(self.addresses) == 2:  # the other may be the last address, which stays
                self.addresses.intersection_update(scheduler.workers)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by distributed when a worker has gone."""
        if len(self.addresses) > 1:
            self.addresses.discard(worker)

    def update_graph(self, scheduler: Scheduler, *, tasks: Collection[Any], **kwargs: Any) -> None:
        """Called by distributed with the keys of new tasks, before they are sent to workers."""
        if not self.addresses:
            return
        for key in tasks:
            task = scheduler.tasks[key]
            if not (task.worker_restrictions or task.host_restrictions or task.resource_restrictions):
                task.worker_restrictions = self.addresses
