"""How much of its host's memory each worker gets."""

from __future__ import annotations

from collections.abc import Sequence

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.base.sizes import format_bytes

__all__ = ["Excess", "worker_limit"]


def worker_limit(limit: int | float | None, memory: int, workers: int) -> int:
    """Give the memory limit of each worker of a host, in bytes; 0: none.

    Parameters
    ----------
    limit : int, float or None
        Bytes, a fraction of the host's memory, or None for an equal part (`parse_memory_limit` reads what the user says).
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


class Excess:
    """Hosts whose workers' limits add up to more than there is, which the user may want: a warning, once for hosts alike."""

    def __init__(self) -> None:
        self._hosts: dict[str, list[str]] = {}

    def add(self, host: str, limit: int, workers: int, memory: int) -> None:
        """Note a host where so many workers with this limit may use more than its memory; 0: unknown."""
        if 0 < memory < limit * workers:
            text = (
                f"{workers} workers with a memory limit of {format_bytes(limit)} each may use more than "
                f"the {format_bytes(memory)} there are"
            )
            self._hosts.setdefault(text, []).append(host)

    def warnings(self) -> Sequence[str]:
        """One line for hosts alike."""
        return [f"on {fold_names(hosts)}, {text}" for text, hosts in self._hosts.items()]
