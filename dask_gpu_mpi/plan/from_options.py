"""From the options of a job to what its plan needs of them."""

from __future__ import annotations

from dask_gpu_mpi.options.model import Options

from .model import PlacementOptions
from .roles import default_client

__all__ = ["expected_client", "placement_options"]


def placement_options(options: Options, *, name: str | None = None) -> PlacementOptions:
    """What the plan needs of the options."""
    return PlacementOptions(
        layout=options.layout,
        cpu_workers=options.cpu_workers,
        gpus_per_worker=options.gpus_per_worker,
        require_idle_gpus=options.require_idle_gpus,
        nthreads=options.nthreads,
        memory_limit=options.memory_limit,
        worker_kind=options.worker_kind,
        name=name if name is not None else options.name,
        scheduler_rank=options.scheduler_rank,
        client_rank=options.client_rank,
        has_scheduler=options.scheduler,
    )


def expected_client(options: Options) -> int:
    """The rank that runs the script: the user's choice, else that of the layout."""
    return default_client(options.layout, options.scheduler_rank, options.client_rank)
