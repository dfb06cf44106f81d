"""What a plan is made of: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.options.protocols import Transport


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
    #: Bytes of its own device for CUDAWorker's sizes of device memory (`device_memory.DEVICE_SIZES`), those that are set and
    #: ``device_memory_limit``; empty for a CPU worker, and if it is not known how much the device has.
    device_sizes: dict[str, int] = field(default_factory=dict)
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


@dataclass(frozen=True)
class PlanData:
    """The fields of a `Plan`, for the modules that display one: `Plan` imports them."""

    layout: str
    world_size: int
    scheduler: Role
    client: Role
    hosts: tuple[HostPlan, ...]
    workers: tuple[WorkerPlan, ...]
    warnings: tuple[Problem, ...] = ()
    scheduler_device: str = ""
