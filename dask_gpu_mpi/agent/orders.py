"""What a rank tells its agent: plain data, light to import on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.options.protocols import Protocol

__all__ = ["Configuration", "SchedulerSettings", "WorkerSettings"]


@dataclass(frozen=True)
class Configuration:
    """The first frame: what the agent must know before it starts anything.

    Attributes
    ----------
    worker_class : str or type
        As the user said it.
    worker_options : dict
        As the user said it.
    local_directory : str or None
        Where the scratch goes; None = Dask's ``temporary-directory``, else the system's.
    protocol : Protocol
        Of Dask.
    log_level : str
        Level of the ``distributed`` loggers.
    dask_config : dict
        The rank's Dask configuration: what the script set before ``initialize()`` holds for its workers too.
    grace : float
        Seconds that workers get to close.
    shutdown_timeout : float
        Seconds that removing the scratch may take.
    log_directory : str or None
        Where log files go, instead of standard error.
    mpi_deadline : float
        When a rank that has not joined the others is stuck in its MPI library, and is ended: ``time.monotonic()``, which is the
        same for all processes of a host, so that all its agents count alike.
    speaks : bool
        Whether to say so then: one rank's word is enough.
    """

    worker_class: str | type
    worker_options: dict[str, Any]
    local_directory: str | None
    protocol: Protocol
    log_level: str
    dask_config: dict[str, Any] = field(repr=False)
    grace: float = 2.0
    shutdown_timeout: float = 10.0
    log_directory: str | None = None
    mpi_deadline: float = math.inf
    speaks: bool = True


@dataclass(frozen=True)
class SchedulerSettings:
    """What the scheduler's process needs to know.

    Attributes
    ----------
    host : str
        Address to listen on.
    port : int
        0 = any free one.
    protocol : str
        ``"tls"``, ``"tcp"`` or ``"ucx"``.
    dashboard : bool
        Whether to serve the dashboard, once the cluster is up.
    dashboard_address : str
        ``host:port`` of the dashboard.
    config : dict
        Dask configuration, the credentials among it.
    device : str
        UUID of the GPU on which it may hold what a client sends or fetches through it over UCX (``client.run``, say); it makes no
        context before. Empty: none.
    """

    host: str
    port: int
    protocol: str
    dashboard: bool
    dashboard_address: str
    config: dict[str, Any] = field(repr=False)
    device: str = ""


@dataclass(frozen=True)
class WorkerSettings:
    """What all workers of a rank have in common.

    Attributes
    ----------
    address : str
        The scheduler's.
    protocol : str
        ``"tls"``, ``"tcp"`` or ``"ucx"``.
    host : str or None
        Address to listen on; None where the user's class chooses by itself.
    interface : str or None
        The interface that the user asked for.
    local_directory : str
        Scratch of this rank; each worker makes a directory of its own in it.
    death_timeout : float
        Seconds after which a worker that can't reach the scheduler gives up.
    worker_class : str or type
        As the user said it; ``"auto"`` = CUDAWorker on a GPU, else Nanny.
    worker_options : dict
        As the user said it, checked.
    device_memory : dict
        Bytes of each device, by UUID.
    log_directory : str or None
        Where each worker's log file goes.
    delay : float
        Seconds to wait before they are started.
    """

    address: str
    protocol: str
    host: str | None
    interface: str | None
    local_directory: str
    death_timeout: float
    worker_class: str | type
    worker_options: dict[str, Any] = field(default_factory=dict)
    device_memory: dict[str, int] = field(default_factory=dict)
    log_directory: str | None = None
    delay: float = 0.0
