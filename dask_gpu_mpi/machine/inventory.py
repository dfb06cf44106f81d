"""The inventory of one rank: its host, cores, memory and GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.cgroups import allowed_cpus, cpu_quota, host_memory
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvml import own_contexts
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES, visible_gpus
from dask_gpu_mpi.network.interfaces import boot_id
from dask_gpu_mpi.sites.batch import cpus_on_node

__all__ = ["Gpu", "Inventory", "take_inventory"]


@dataclass(frozen=True)
class Inventory:
    """What one rank sees of the machine it runs on."""

    #: The rank, as MPI numbers it.
    rank: int
    #: How many ranks MPI has.
    world_size: int
    #: Name of the host; ranks with the same one and the same boot id share it.
    host: str
    #: See `boot_id`.
    boot_id: str
    #: The rank's process.
    pid: int
    #: The cores that the rank may use.
    cpus: tuple[int, ...]
    #: Bytes of memory that the rank may use on this host; 0: unknown.
    memory: int
    #: The GPUs that the rank sees, in the order of visibility.
    gpus: tuple[Gpu, ...]
    #: ``CUDA_VISIBLE_DEVICES`` as found, None if unset; for messages.
    visible: str | None
    #: What a person should know, each one line.
    warnings: tuple[str, ...] = ()
    #: Devices on which the rank's own process has a CUDA context.
    contexts: tuple[str, ...] = ()
    #: Cores that the rank may keep busy: a quota of CPU time, or those of the batch job if nothing confines it to them; None:
    #: neither is known.
    cpu_quota: float | None = None


def take_inventory(
    rank: int,
    world_size: int,
    environ: Mapping[str, str],
    *,
    look_for_gpus: bool = True,
    host: str | None = None,
    nvml: Any = None,
    seen: tuple[Gpu, ...] | None = None,
) -> Inventory:
    """Take the inventory of this rank's machine.

    Parameters
    ----------
    rank, world_size : int
        As MPI numbers them.
    environ : mapping
        The environment in which ``CUDA_VISIBLE_DEVICES`` counts.
    look_for_gpus : bool
        False leaves NVML alone, for jobs whose workers are to use no GPU.
    host : str, optional
        The host's name; asked of the system unless given.
    nvml : module, optional
        What to ask for GPUs, `pynvml` unless given.
    seen : tuple of Gpu, optional
        What `visible_gpus` gave a while ago.

    Returns
    -------
    Inventory
        GPUs that are visible but lost are left out, with a warning.

    Raises
    ------
    InputError
        ``CUDA_VISIBLE_DEVICES`` names what is not there, or NVML is there and does not work.
    """
    host = socket.gethostname() if host is None else host
    visible = environ.get(VISIBLE_DEVICES)
    gpus: tuple[Gpu, ...] = ()
    # A rank that is to see no GPU does not depend on NVML either.
    if seen is not None:
        gpus = seen
    elif look_for_gpus:
        try:
            gpus = visible_gpus(environ, nvml)
        except InputError as error:
            raise InputError(f"rank {rank} of {world_size} on {host}: {error}") from error
    return Inventory(
        rank=rank,
        world_size=world_size,
        host=host,
        boot_id=boot_id(),
        pid=os.getpid(),
        cpus=allowed_cpus(),
        memory=host_memory(),
        cpu_quota=min(filter(None, (cpu_quota(), cpus_on_node(environ))), default=None),
        gpus=tuple(gpu for gpu in gpus if gpu.uuid),
        visible=visible,
        contexts=own_contexts() if look_for_gpus else (),
        # Without the rank, so that the ranks of a host report it once together.
        warnings=tuple(
            f"host {host}: GPU {gpu.index} is left out, NVML can't read it ({gpu.name}). Fix: reset it or leave the node out of "
            "the job"
            for gpu in gpus
            if not gpu.uuid
        ),
    )
