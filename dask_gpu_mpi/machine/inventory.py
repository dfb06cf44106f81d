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
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, own_contexts, visible_gpus
from dask_gpu_mpi.network.interfaces import boot_id


@dataclass(frozen=True)
class Inventory:
    """The host, cores, memory and GPUs of one rank."""

    rank: int
    world_size: int
    #: Ranks with the same host name and boot id share a node.
    host: str
    boot_id: str
    #: The rank's process.
    pid: int
    cpus: tuple[int, ...]
    #: Bytes that the rank may use; 0: unknown.
    memory: int
    #: In the order of visibility.
    gpus: tuple[Gpu, ...]
    #: ``CUDA_VISIBLE_DEVICES`` as found, None if unset; for messages.
    visible: str | None
    #: Each one line.
    warnings: tuple[str, ...] = ()
    #: Devices on which the rank's own process has a CUDA context.
    contexts: tuple[str, ...] = ()
    #: CPU time of the rank's container, in cores; None: no quota.
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
    """Take the inventory of this rank's machine; lost GPUs are left out, with a warning. Raises an InputError as `visible_gpus`.

    `look_for_gpus` is False if no worker is to use a GPU. `seen` is an earlier result of `visible_gpus`.
    """
    host = socket.gethostname() if host is None else host
    gpus = seen or ()
    if seen is None and look_for_gpus:
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
        cpu_quota=cpu_quota(),
        gpus=tuple(gpu for gpu in gpus if gpu.uuid),
        visible=environ.get(VISIBLE_DEVICES),
        contexts=own_contexts() if look_for_gpus else (),
        # without the rank, so that the ranks of a host share one line
        warnings=tuple(
            f"host {host}: GPU {gpu.index} is left out, NVML can't read it ({gpu.name}). Fix: reset it or leave the node out of "
            "the job"
            for gpu in gpus
            if not gpu.uuid
        ),
    )
