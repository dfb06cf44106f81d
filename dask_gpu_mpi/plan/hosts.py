"""The hosts of a job while its plan is made: the ranks, GPUs, memory and CPU time of each, and warnings about their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dask_gpu_mpi.base.text import format_bytes, ranks_text
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.plan.model import HostPlan

__all__ = [
    "Host",
    "existing_contexts",
    "gpus_in_use",
    "gpus_without_worker",
    "group_by_host",
    "name_some",
    "ranks_without_gpu",
    "refuse_gpus_in_use",
    "refuse_machine_with_two_names",
]


@dataclass
class Host:
    """One host while the plan is made."""

    #: Two hosts of one name are told apart as ``h`` and ``h#2``.
    name: str
    ranks: list[Inventory]
    #: Those of its ranks that take workers.
    working: list[Inventory]
    #: In the order of PCI bus (index, if unknown) and slice.
    gpus: list[Gpu]
    #: Bytes; 0: unknown.
    memory: int
    #: In cores; None: no quota.
    cpu_quota: float | None
    #: For each working rank the GPUs of each of its workers; empty in a job on CPUs.
    share: dict[int, list[tuple[Gpu, ...]]] = field(default_factory=dict)

    def plan(self) -> HostPlan:
        """What the plan has of it."""
        ranks = tuple(rank.rank for rank in self.ranks)
        return HostPlan(self.name, ranks, tuple(self.gpus), self.memory, self.cpu_quota)


def group_by_host(ranks: Sequence[Inventory], reserved: set[int], *, use_gpus: bool) -> list[Host]:
    """The hosts in the order of their lowest ranks; `reserved` ranks take no workers."""
    groups: dict[tuple[str, str], list[Inventory]] = {}
    for rank in ranks:
        groups.setdefault((rank.host, rank.boot_id), []).append(rank)
    names = {host for host, _ in groups}
    used: set[str] = set()
    hosts = []
    for (host, _), members in groups.items():
        name, number = host, 1
        while name in used or (number > 1 and name in names):
            number += 1
            name = f"{host}#{number}"
        used.add(name)
        quotas = [rank.cpu_quota for rank in members if rank.cpu_quota is not None]
        hosts.append(
            Host(
                name,
                members,
                working=[rank for rank in members if rank.rank not in reserved],
                gpus=gpus_of_host((rank.pid, rank.gpus) for rank in members) if use_gpus else [],
                # Ranks may sit in different cgroups, and the sum of their limits need not be there.
                memory=min((rank.memory for rank in members if rank.memory), default=0),
                cpu_quota=min(quotas, default=None),
            )
        )
    return hosts


def refuse_machine_with_two_names(hosts: Sequence[Host]) -> None:
    """Raise PlacementError for one GPU under two host names of one machine (containers): it would get two workers."""
    first: dict[tuple[str, str], Host] = {}
    for host in hosts:
        boot_id = host.ranks[0].boot_id
        for gpu in host.gpus:
            other = first.setdefault((boot_id, gpu.uuid), host)
            if other is not host:
                raise PlacementError(
                    f"GPU {gpu.index} ({gpu.uuid}) is seen by {ranks_text(r.rank for r in other.ranks)} on {other.name} "
                    f"and by {ranks_text(r.rank for r in host.ranks)} on {host.name}, two names of one machine "
                    f"(boot id {boot_id or 'unknown'}). Fix: give it one host name, or each name its own GPUs by "
                    f"{VISIBLE_DEVICES}"
                )


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
