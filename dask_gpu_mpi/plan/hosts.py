"""The hosts of a job while its plan is made: the ranks, GPUs, memory and CPU time of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES

from .model import HostPlan

__all__ = ["Host", "group_by_host", "refuse_machine_with_two_names"]


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
