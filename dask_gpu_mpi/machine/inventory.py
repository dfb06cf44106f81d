"""The inventory of one rank: its host, cores, memory and GPUs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.cgroups import allowed_cpus, cpu_quota, host_memory
from dask_gpu_mpi.machine.gpus import NO_PROMISE, Gpu, Promise, why_none
from dask_gpu_mpi.machine.nvidia import INSPECT_COMMAND, VISIBLE_DEVICES, sees_none
from dask_gpu_mpi.network.interfaces import boot_id
from dask_gpu_mpi.sites.batch import cpus_on_node, gpus_on_node


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
    warnings: tuple[Problem, ...] = ()
    #: Devices on which the rank's own process has a CUDA context.
    contexts: tuple[str, ...] = ()
    #: Cores that the rank may keep busy: a quota of CPU time, or those of the batch job if nothing confines it to them; None:
    #: neither is known.
    cpu_quota: float | None = None
    #: The GPUs that it should see.
    promise: Promise = NO_PROMISE
    #: The rank has not responded, and takes no part.
    absent: bool = False


def absent_inventory(rank: int, world_size: int, host: str, boot_id: str, timeout: float) -> Inventory:
    """What is known of a rank that has not responded for `timeout` seconds."""
    warning = Problem(
        f"rank {rank} of {world_size} on {host} has not responded within {timeout:g} s (startup_timeout); starting without it",
        fix="inspect that node (a rank that is stopped, no memory left, a slow file system?)",
        ranks=(rank,),
        hosts=(host,),
    )
    nothing: dict[str, Any] = {"pid": 0, "cpus": (), "memory": 0, "gpus": (), "visible": None}
    return Inventory(rank, world_size, host, boot_id, warnings=(warning,), absent=True, **nothing)


def take_inventory(
    rank: int,
    world_size: int,
    environ: Mapping[str, str],
    seen: Sequence[Gpu] | None,
    *,
    pid: int,
    contexts: Sequence[str] = (),
) -> Inventory:
    """Take the inventory of this rank's machine; lost GPUs are left out, with a warning.

    `seen` is the result of `nvidia.visible_gpus`; None: no worker is to use a GPU. `pid` is the rank's process, `contexts` the
    devices on which it has a CUDA context.
    """
    host = socket.gethostname()
    gpus = seen or ()
    return Inventory(
        rank=rank,
        world_size=world_size,
        host=host,
        boot_id=boot_id(),
        pid=pid,
        cpus=allowed_cpus(),
        memory=host_memory(),
        cpu_quota=min(filter(None, (cpu_quota(), cpus_on_node(environ))), default=None),
        gpus=tuple(gpu for gpu in gpus if gpu.uuid),
        visible=environ.get(VISIBLE_DEVICES),
        contexts=() if seen is None else tuple(contexts),
        promise=_promise(environ),
        # without the rank, so that the ranks of a host share one line
        warnings=tuple(
            Problem(
                f"host {host}: GPU {gpu.index} is left out, NVML can't read it ({gpu.name})",
                fix="reset it or leave the node out of the job",
                what="GPUs",
                hosts=(host,),
            )
            for gpu in gpus
            if not gpu.uuid
        ),
    )


def _promise(environ: Mapping[str, str]) -> Promise:
    visible = environ.get(VISIBLE_DEVICES)
    if sees_none(visible):
        return NO_PROMISE
    count, variable = gpus_on_node(environ)
    source = f"{variable}={count}"
    if not count and visible:
        count, source = visible.count(",") + 1, f"{VISIBLE_DEVICES}={visible}"
    if not count:
        return NO_PROMISE
    # `launch` sets such a variable on nodes that the job shares
    return Promise(count, source, why_none(environ, INSPECT_COMMAND), is_shared=variable.startswith("DGM_"))
