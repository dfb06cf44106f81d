"""The parts of a plan, and what of them each rank gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dask_gpu_mpi.machine.gpus import NO_PROMISE, Gpu, Promise
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
