"""How much of its host's memory each worker gets."""

from __future__ import annotations

from collections.abc import Iterable

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.base.sizes import format_bytes

__all__ = ["excess_warnings", "worker_limit"]


def worker_limit(limit: int | float | None, memory: int, workers: int) -> int:
    """Give the memory limit of each worker of a host, in bytes; 0: none.

    Parameters
    ----------
    limit : int, float or None
        Bytes, a fraction of the host's memory, or None for an equal part (as `parse_memory_limit` gives it).
    memory : int
        Bytes that the job may use on the host; 0: unknown.
    workers : int
        Workers of the host, over all ranks.

    Examples
    --------
    >>> worker_limit(None, 1000, 4), worker_limit(0.5, 1000, 4), worker_limit(300, 1000, 4), worker_limit(None, 0, 4)
    (250, 500, 300, 0)
    """
    if limit is None:
        return memory // workers if workers else 0
    return int(limit * memory) if isinstance(limit, float) else limit


def excess_warnings(hosts: Iterable[tuple[str, int, int, int]]) -> list[str]:
    """Warn of hosts whose workers' limits add up to more than there is, which the user may want: one line for hosts alike.

    Parameters
    ----------
    hosts : iterable of tuple
        Name, limit of each worker, number of workers, and memory (0: unknown) of each host.

    Examples
    --------
    >>> excess_warnings([("h1", 600, 2, 1000), ("h2", 600, 2, 1000), ("h3", 500, 2, 1000)])
    ['on h[1-2], 2 workers with a memory limit of 600 B each may use more than the 1000 B there are']
    """
    alike: dict[tuple[int, int, int], list[str]] = {}
    for name, limit, workers, memory in hosts:
        alike.setdefault((limit, workers, memory), []).append(name)
    return [
        f"on {fold_names(names)}, {workers} workers with a memory limit of {format_bytes(limit)} each may use more than "
        f"the {format_bytes(memory)} there are"
        for (limit, workers, memory), names in alike.items()
        if 0 < memory < limit * workers
    ]
