"""What the workers of a rank are started with: plain data, light to import on both sides of the control pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.options.protocols import Transport
from dask_gpu_mpi.plan.model import WorkerPlan

__all__ = ["Start"]


@dataclass(frozen=True)
class Start:
    """A rank's part of the plan, and how to reach the scheduler."""

    #: The scheduler's.
    address: str
    #: ``"tls"``, ``"tcp"`` or ``"ucx"``.
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
    #: Name of the worker that tries UCX to the next node once it is up; None: another rank of its node does, or there is one.
    ucx_probe: str | int | None = None
