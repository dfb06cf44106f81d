"""The inventory of one rank: its host, cores, memory and GPUs; and those of a hypothetical job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dask_gpu_mpi.errors import OptionError, Problem
from dask_gpu_mpi.machine import NO_PROMISE, Gpu, Promise, why_none
from dask_gpu_mpi.machine.cgroups import allowed_cpus, cpu_quota, host_memory
from dask_gpu_mpi.machine.nvidia import INSPECT_COMMAND, VISIBLE_DEVICES, sees_none
from dask_gpu_mpi.network.interfaces import boot_id
from dask_gpu_mpi.sites.batch import batch_job, cpus_on_node, gpus_on_node

#: A folder of NVIDIA's driver with all GPUs of the node, even those that a batch system keeps from the job.
DRIVER = "/proc/driver/nvidia/gpus"


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
    source, fix = f"{variable}={count}", why_none(environ, INSPECT_COMMAND)
    if not count and visible:
        count, source = visible.count(",") + 1, f"{VISIBLE_DEVICES}={visible}"
        fix = f"correct or unset it; or {fix}"
    if not count and batch_job(environ) and environ.get("DGM_EXPECT_GPUS") != "0" and os.path.isdir(DRIVER):
        return Promise(
            0,
            "the node has GPUs of NVIDIA",
            "request them from the batch system, and let a container see them",
        )
    if not count:
        return NO_PROMISE
    # `launch` sets such a variable on nodes that the job shares
    return Promise(count, source, fix, is_shared=variable.startswith("DGM_"))


# Inventories of a hypothetical allocation, for ``plan --nodes N ...``.

GPU_MEMORY = 80 * 1024**3
#: Bytes of memory of each node by default, for ``plan --nodes`` and for the plan that `jobscript` checks alike.
NODE_MEMORY = 512 * 1024**3
#: Most ranks, GPUs and cores of a job: more than any machine has, and a plan is made of each.
MOST_RANKS, MOST_CORES = 200_000, 20_000_000


def hypothetical_job(
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    visible: Literal["all", "per-rank"] = "all",
    cpus_per_node: int = 64,
    memory_per_node: int = NODE_MEMORY,
    total: int | None = None,
) -> tuple[Inventory, ...]:
    """Make the inventories of a hypothetical job on alike hosts ``h1`` to ``hN``.

    Ranks fill one host after the other and are bound to no cores. Each host has two NUMA nodes with half of the cores and
    half of the GPUs each. With `visible` "all" every rank sees all GPUs of its host (as with ``--gpus-per-node``), with
    "per-rank" a part of them (as with ``--gpus-per-task``), the first ranks one more if they do not divide evenly. With
    `total` the last host has the rest of them. An OptionError if there are too many.

    >>> [(rank.rank, rank.host, rank.visible) for rank in hypothetical_job(1, 2, 4, "per-rank")]
    [(0, 'h1', '0,1'), (1, 'h1', '2,3')]
    """
    for option, number, most in (
        ("ranks-per-node", ranks_per_node, MOST_RANKS),
        ("gpus-per-node", gpus_per_node, MOST_RANKS),
        ("cpus-per-node", cpus_per_node, MOST_CORES),
    ):
        if nodes * number > most:
            raise OptionError(
                f"--nodes {nodes} --{option} {number}: too many",
                expected=f"at most {most} in all",
                fix="plan a part of the job",
            )
    cpus = tuple(range(cpus_per_node))
    half = (cpus_per_node + 1) // 2
    numa = (cpus[:half], cpus[half:] or cpus)
    found: list[Inventory] = []
    for node in range(nodes):
        rest = gpus_per_node if total is None else total - node * gpus_per_node
        gpus = tuple(
            Gpu(
                # The part of the UUID that tables have tells GPUs of different hosts apart.
                uuid=f"GPU-{node * gpus_per_node + index:08x}-0000-0000-0000-000000000000",
                index=index,
                name="GPU",
                memory=GPU_MEMORY,
                cpus=numa[2 * index >= gpus_per_node],
                pci=f"00000000:{index:02X}:00.0",
            )
            for index in range(min(gpus_per_node, rest))
        )
        for place in range(ranks_per_node):
            seen = gpus if visible == "all" else gpus[_block(len(gpus), ranks_per_node, place)]
            found.append(
                Inventory(
                    rank=node * ranks_per_node + place,
                    world_size=nodes * ranks_per_node,
                    host=f"h{node + 1}",
                    boot_id="hypothetical",
                    pid=0,
                    cpus=cpus,
                    memory=memory_per_node,
                    gpus=seen,
                    visible=None if visible == "all" else ",".join(str(gpu.index) for gpu in seen),
                )
            )
    return tuple(found)


def _block(number: int, parts: int, place: int) -> slice:
    """One of `parts` contiguous blocks whose sizes differ by at most one."""
    share, extra = divmod(number, parts)
    start = place * share + min(place, extra)
    return slice(start, start + share + (place < extra))
