"""What a plan is made of, and what may be asked of it: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dask_gpu_mpi.machine.gpus import Gpu

__all__ = ["HostPlan", "PlacementOptions", "Role", "WorkerPlan"]


@dataclass(frozen=True)
class PlacementOptions:
    """What the user may say about placement.

    Attributes
    ----------
    layout : {"shared", "exclusive"}
        Shared: all ranks take workers, rank 0 has the scheduler and the client besides. Exclusive: the
        scheduler's and the client's rank, which may be the same, take no workers.
    cpu_workers : int
        CPU workers to add on every host.
    gpus_per_worker : int
        GPUs that each GPU worker sees.
    require_idle_gpus : bool
        Whether memory that other processes hold on a worker's GPU is an error instead of a warning.
    nthreads : int, optional
        Threads of every worker; by default 1 for GPU workers (dask-cuda's default), for CPU workers their
        share of cores.
    memory_limit : int, float, str or None
        Of each worker: ``"auto"``, bytes (``4e9``, ``"4GB"``), a fraction up to 1 of the host's memory, 0 or
        None for none.
    worker_kind : {"auto", "cpu", "gpu"}
        Auto: GPU workers where there is a GPU anywhere. CPU: GPUs are ignored. GPU: without any GPU, an
        error.
    name : str, optional
        Prefix of worker names: ``<name>-<rank>...``.
    scheduler_rank, client_rank : int
        Where the scheduler and the client live. The client by default on rank 0 (shared), or on rank 1
        (exclusive).
    has_scheduler, has_client : bool
        Whether this job starts a scheduler, and runs a script: in layout ``exclusive`` a rank is reserved for what there is.
    """

    layout: str = "shared"
    cpu_workers: int = 0
    gpus_per_worker: int = 1
    require_idle_gpus: bool = False
    nthreads: int | None = None
    memory_limit: int | float | str | None = "auto"
    worker_kind: str = "auto"
    name: str | None = None
    scheduler_rank: int = 0
    client_rank: int | None = None
    has_scheduler: bool = True
    has_client: bool = True


@dataclass(frozen=True)
class Role:
    """The rank, and its host, that has a role."""

    rank: int
    host: str


@dataclass(frozen=True)
class HostPlan:
    """One host of the job.

    Attributes
    ----------
    host : str
        Its name; two hosts of one name are told apart as ``h`` and ``h#2``.
    ranks : tuple of int
        The ranks on it.
    gpus : tuple of Gpu
        The GPUs that the job may use on it, in the order of PCI bus (index, if unknown) and slice: their place here is the
        `gpu_index` in worker names.
    memory : int
        Bytes that the job may use on it: the smallest that its ranks report, since ranks may sit in different
        cgroups and the sum of their limits need not be there. 0: unknown.
    cpu_quota : float or None
        CPU time that its ranks may use, in cores: the smallest quota that they report. None: no quota.
    """

    host: str
    ranks: tuple[int, ...]
    gpus: tuple[Gpu, ...]
    memory: int
    cpu_quota: float | None = None


@dataclass(frozen=True)
class WorkerPlan:
    """One worker.

    Attributes
    ----------
    name : str or int
        ``<rank>-<gpu_index>`` on a GPU, the rank itself (an int, as in dask-mpi) in a job without GPUs,
        ``<rank>-cpu-<i>`` for additional CPU workers; with a prefix ``<prefix>-`` before.
    rank, host
        Where it is started.
    kind : {"gpu", "cpu"}
        What it is for.
    gpu_index : int or None
        The GPU's place among those of the host that the job may use; of several, the first's.
    device : str or None
        UUID of the GPU it sees; of several GPUs, joined by commas: its ``CUDA_VISIBLE_DEVICES``.
    nthreads : int
        Threads for tasks.
    memory_limit : int
        Bytes; 0: no limit.
    cpus : tuple of int
        Cores it may use.
    resources : dict
        Dask resources: ``GPU=<its GPUs>``, or ``CPU=<nthreads>``.
    """

    name: str | int
    rank: int
    host: str
    kind: Literal["gpu", "cpu"]
    gpu_index: int | None
    device: str | None
    nthreads: int
    memory_limit: int
    cpus: tuple[int, ...]
    resources: dict[str, float]

    @property
    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs it sees; its device 0 comes first."""
        return tuple(self.device.split(",")) if self.device else ()
