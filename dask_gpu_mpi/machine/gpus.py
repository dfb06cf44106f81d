"""The GPUs of a host, as data: whatever vendor's library lists them, and put together from what several ranks see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["Gpu", "gpus_of_host"]


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance."""

    #: ``GPU-...`` or ``MIG-...``. Empty: the vendor's library lists the GPU but can't read it (a lost GPU); then `name` is the
    #: library's text.
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
    #: The compute processes other than the one that asked, and the bytes of device memory that each holds; None:
    #: unknown.
    processes: tuple[tuple[int, int | None], ...] = ()
    #: Bytes of device memory that were free at that moment; -1: unknown.
    free: int = -1
    #: Whether one process alone may use it: its compute mode is not the default.
    exclusive: bool = False

    @property
    def busy(self) -> int | None:
        """Bytes of device memory that `processes` hold; None: they hold some, and how much is unknown."""
        sizes = [held for _, held in self.processes]
        return None if None in sizes else sum(filter(None, sizes))


def gpus_of_host(views: Iterable[tuple[int, Iterable[Gpu]]]) -> list[Gpu]:
    """Put together what the ranks of one host see; none of the ranks counts as another process.

    Parameters
    ----------
    views : iterable of (int, iterable of Gpu)
        Process id of each rank, and what it sees.

    Returns
    -------
    list of Gpu
        Each once, in PCI order. Each rank asked at its own time: the worst that one saw counts.
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
    # Behind cgroups each rank counts from 0: there an index orders nothing.
    return sorted(found.values(), key=lambda gpu: (gpu.pci, 0 if gpu.pci else gpu.index, gpu.slice, gpu.uuid))
