"""What the user should know about the GPUs of a job: without a worker, missing, in use."""

from __future__ import annotations

from collections.abc import Sequence

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.sizes import format_bytes
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES

from .hosts import Host

__all__ = [
    "existing_contexts",
    "gpus_in_use",
    "gpus_without_worker",
    "name_some",
    "ranks_without_gpu",
    "refuse_gpus_in_use",
]

# A warning about a large job names so many places and counts the others.
_MOST_PLACES = 8


def gpus_without_worker(hosts: Sequence[Host]) -> list[str]:
    """GPUs that only reserved ranks see (layout ``exclusive``)."""
    lost = {
        h.name: len({gpu.uuid for gpu in h.gpus} - {gpu.uuid for rank in h.working for gpu in rank.gpus})
        for h in hosts
    }
    places = [f"{number} on {name}" for name, number in lost.items() if number]
    if not places:
        return []
    count = sum(lost.values())
    return [
        f"{count} {'GPU gets' if count == 1 else 'GPUs get'} no worker, because only ranks that take no workers see them: "
        f"{name_some(places)}. Fix: let all ranks of a host see its GPUs, or take layout 'shared'"
    ]


def ranks_without_gpu(hosts: Sequence[Host]) -> list[str]:
    """Ranks that get no GPU, in a job on GPUs."""
    without = {h.name: [rank.rank for rank in h.working if not h.share[rank.rank]] for h in hosts}
    places = [f"{ranks_text(ranks)} on {name}" for name, ranks in without.items() if ranks]
    if not places:
        return []
    count = sum(map(len, without.values()))
    return [
        f"more ranks than GPUs: {name_some(places)} "
        f"{'gets none and starts' if count == 1 else f'get none, and these {count} ranks start'} "
        "no GPU worker (one rank per node is enough; --cpu-workers adds CPU workers)"
    ]


def gpus_in_use(hosts: Sequence[Host]) -> list[str]:
    """GPUs on which other processes hold memory."""
    return [_in_use(host, gpu) for host in hosts for gpu in host.gpus if gpu.processes]


def refuse_gpus_in_use(hosts: Sequence[Host]) -> None:
    """Raise PlacementError where other processes hold memory on a GPU that gets a worker."""
    with_worker = {
        gpu.uuid for host in hosts for sets in host.share.values() for gpus in sets for gpu in gpus
    }
    found = [
        _in_use(host, gpu) for host in hosts for gpu in host.gpus if gpu.processes and gpu.uuid in with_worker
    ]
    if found:
        raise PlacementError(
            f"{name_some(found)} (expected idle GPUs: require_idle_gpus, --require-idle-gpus). Fix: end those processes, leave "
            f"the GPUs out with {VISIBLE_DEVICES}, or allow them with --no-require-idle-gpus"
        )


def _in_use(host: Host, gpu: Gpu) -> str:
    name = f"host {host.name}: GPU {gpu.index} ({gpu.uuid})"
    if gpu.busy is None:
        return f"{name} has memory in use by other processes (NVML does not report how much)"
    return f"{name} has {gpu.busy} bytes ({format_bytes(gpu.busy)}) in use by other processes"


def existing_contexts(ranks: Sequence[Inventory]) -> list[str]:
    """CUDA contexts of the ranks' own processes."""
    places = [
        f"rank {rank.rank} on {rank.host} ({', '.join(rank.contexts)})" for rank in ranks if rank.contexts
    ]
    if not places:
        return []
    return [
        f"CUDA contexts were made before the cluster started, and take device memory from the workers: {name_some(places)}. "
        "Fix: use CUDA only after initialize(), or check what the script imports (or a GPU-aware MPI)"
    ]


def name_some(places: Sequence[str]) -> str:
    """The first places by name, and the number of the others."""
    text = ", ".join(places[:_MOST_PLACES])
    more = len(places) - _MOST_PLACES
    return f"{text} and {more} more" if more > 0 else text
