"""What the workers of a rank have in common: plain data, light to import on both sides of the control pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.options.protocols import Transport

__all__ = ["WorkerConfiguration", "WorkerSettings"]


@dataclass(frozen=True, kw_only=True)
class WorkerConfiguration:
    """What is known of the workers before there is a plan: what the user has set for them."""

    #: As the user set it; ``"auto"`` = CUDAWorker on a GPU, else Nanny.
    worker_class: str | type
    #: As the user set it.
    worker_options: dict[str, Any]
    #: Seconds that workers get to close.
    grace: float = 2.0
    #: Where log files go, instead of standard error.
    log_directory: str | None = None
    #: The network interface that the user set, for workers of the user's own class.
    interface: str | None = None
    #: Whether they are to report how much data they have fetched, for the job's report.
    records: bool = False


@dataclass(frozen=True)
class WorkerSettings:
    """What is known of the workers only once there is a plan."""

    #: The scheduler's.
    address: str
    #: ``"tls"``, ``"tcp"`` or ``"ucx"``.
    protocol: str
    #: Address to listen on; None where the user's class chooses by itself.
    host: str | None
    #: Seconds after which a worker that can't reach the scheduler gives up.
    death_timeout: float
    #: Whether the job uses GPUs of its node, which CPU workers must not touch.
    beside_gpus: bool = False
    #: Seconds to wait before they are started.
    delay: float = 0.0
    #: What they send each other over UCX.
    transport: Transport = field(default_factory=Transport)
    #: Name of the one that tries UCX to the next node.
    ucx_probe: str | int | None = None
