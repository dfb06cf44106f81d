"""The GPUs of a host, as data that is the same for every vendor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance."""

    #: ``GPU-...`` or ``MIG-...``. Empty: the vendor's library lists the GPU but can't read it (a lost GPU), and `name` is its
    #: error.
    uuid: str
    #: The library's index, in PCI order; for a MIG instance its parent's.
    index: int
    #: The product's name.
    name: str
    #: Bytes of device memory; of the slice for a MIG instance; 0: unknown.
    memory: int
    #: Cores of the NUMA node near the GPU; empty: unknown.
    cpus: tuple[int, ...] = ()
    #: PCI bus id; empty: unknown.
    pci: str = ""
    #: UUID of the GPU that a MIG instance is a part of; empty for a whole GPU.
    parent: str = ""
    #: Index of the MIG instance on its parent; -1 for a whole GPU.
    slice: int = -1
    #: The compute processes of others, and the bytes of device memory that each holds; None: unknown.
    processes: tuple[tuple[int, int | None], ...] = ()
    #: Bytes of free device memory; -1: unknown.
    free: int = -1
    #: Whether only one process may use it: its compute mode is not the default.
    exclusive: bool = False

    @property
    def busy(self) -> int | None:
        """Bytes of device memory that `processes` hold; None: they hold some, and how much is unknown."""
        sizes = [held for _, held in self.processes]
        return None if None in sizes else sum(filter(None, sizes))


def gpus_of_host(views: Iterable[tuple[int, Iterable[Gpu]]]) -> list[Gpu]:
    """Merge the GPUs that the ranks of one host see (by process id), in PCI order; ranks do not count as other processes.

    Each rank queries at another time, so the least free and the most used memory counts.
    """
    seen = [(pid, tuple(gpus)) for pid, gpus in views]
    ranks = {pid for pid, _ in seen}
    found: dict[str, Gpu] = {}
    held: dict[str, dict[int, int | None]] = {}
    for _, gpus in seen:
        for gpu in gpus:
            known = found.setdefault(gpu.uuid, gpu)
            free = min((number for number in (known.free, gpu.free) if number >= 0), default=-1)
            found[gpu.uuid] = replace(known, free=free)
            sizes = held.setdefault(gpu.uuid, {})
            for pid, size in gpu.processes:
                before = sizes.get(pid)
                sizes[pid] = size if before is None else max(before, size or 0)
    for uuid, sizes in held.items():
        others = tuple((pid, size) for pid, size in sizes.items() if pid not in ranks)
        found[uuid] = replace(found[uuid], processes=others)
    # With cgroups each rank counts from 0, so the index gives no order.
    return sorted(found.values(), key=lambda gpu: (gpu.pci, 0 if gpu.pci else gpu.index, gpu.slice, gpu.uuid))
