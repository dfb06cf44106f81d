"""From inventories and options to the plan: pure functions."""

from __future__ import annotations

from dask_gpu_mpi.plan.model import PlanData


class Plan(PlanData):
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

    def table(self) -> str:
        """The plan for people: roles, then each host with its workers, then the warnings."""
        from dask_gpu_mpi.base.text import plain_text
        from dask_gpu_mpi.plan.nodes import display

        return plain_text(display(self))

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        from dask_gpu_mpi.plan.nodes import svg

        return svg(self)
