"""What a plan is made of: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dask_gpu_mpi.machine.gpus import Gpu

if TYPE_CHECKING:
    from dask_gpu_mpi.options.model import Options

__all__ = ["HostPlan", "PlacementOptions", "Planned", "Role", "WorkerPlan", "placement_options"]


@dataclass(frozen=True)
class PlacementOptions:
    """The options that shape a plan; their values are checked in `dask_gpu_mpi.options`."""

    #: "shared": all ranks take workers, rank 0 has the scheduler and the client besides. "exclusive": the scheduler's and the
    #: client's rank, which may be the same, take no workers.
    layout: str = "shared"
    #: CPU workers to add on every host.
    cpu_workers: int = 0
    #: GPUs that each GPU worker sees.
    gpus_per_worker: int = 1
    #: Whether memory that other processes hold on a worker's GPU is an error instead of a warning.
    require_idle_gpus: bool = False
    #: Threads of every worker; None: 1 for GPU workers (dask-cuda's default), for CPU workers their share of cores.
    nthreads: int | None = None
    #: Of each worker: "auto", bytes (4e9, "4GB"), a fraction up to 1 of the host's memory, 0 or None for none.
    memory_limit: int | float | str | None = "auto"
    #: "auto": GPU workers where there is a GPU anywhere. "cpu": GPUs are ignored. "gpu": without any GPU, an error.
    worker_kind: Literal["auto", "cpu", "gpu"] = "auto"
    #: Prefix of worker names: ``<name>-<rank>...``.
    name: str | None = None
    scheduler_rank: int = 0
    #: None: rank 0 (shared), or rank 1 (exclusive).
    client_rank: int | None = None
    #: Whether this job starts a scheduler, and whether it runs a script: in layout "exclusive" a rank is reserved for each.
    has_scheduler: bool = True
    has_client: bool = True


def placement_options(options: Options, *, name: str | None = None) -> PlacementOptions:
    """What a plan needs of all the options of a job."""
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

    @property
    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs it sees; its device 0 comes first."""
        return tuple(self.device.split(",")) if self.device else ()


class Planned(Protocol):
    """A `Plan`, for the modules that show one: `Plan` imports them."""

    @property
    def layout(self) -> str: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def scheduler(self) -> Role: ...  # noqa: D102
    @property
    def client(self) -> Role: ...  # noqa: D102
    @property
    def hosts(self) -> tuple[HostPlan, ...]: ...  # noqa: D102
    @property
    def workers(self) -> tuple[WorkerPlan, ...]: ...  # noqa: D102
    @property
    def warnings(self) -> tuple[str, ...]: ...  # noqa: D102
