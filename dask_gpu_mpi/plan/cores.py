"""Sharing the cores of a host between its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

from dask_gpu_mpi.machine.gpus import Gpu

__all__ = ["intersection", "near_cores", "share_cores"]


def near_cores(gpus: Iterable[Gpu]) -> frozenset[int]:
    """The cores near any of these GPUs; empty: unknown."""
    return frozenset().union(*(gpu.cpus for gpu in gpus))


@lru_cache  # hosts are alike, and masks are long
def intersection(near: frozenset[int], allowed: tuple[int, ...]) -> tuple[int, ...]:
    """The cores that are near and allowed."""
    return tuple(sorted(near.intersection(allowed)))


def share_cores(masks: Sequence[tuple[int, ...]], quota: float | None = None) -> list[int]:
    """Give each of a host's CPU workers a number of threads, from the cores that each may use.

    A core that k workers may use counts for one k-th with each. So workers with cores of their own get all of them; and no worker
    less than one thread.

    Parameters
    ----------
    masks : sequence of tuple of int
        For each worker the cores that it may use.
    quota : float, optional
        CPU time that all of them together may use, in cores: where the threads are more, all get fewer alike.

    Examples
    --------
    >>> cores = tuple(range(8))
    >>> share_cores([cores, cores])
    [4, 4]
    >>> share_cores([(0, 1)] * 4)
    [1, 1, 1, 1]
    >>> share_cores([cores, cores], quota=5.0)
    [2, 2]
    """
    users: Counter[int] = Counter()
    for mask in masks:
        users.update(mask)
    # Together the shares are the cores that any of them may use.
    part = Fraction(1) if quota is None or not users else min(Fraction(1), Fraction(quota) / len(users))
    threads: dict[tuple[int, ...], int] = {}
    for mask in set(masks):
        sharers = Counter(users[core] for core in mask)
        threads[mask] = int(part * sum(Fraction(cores, number) for number, cores in sharers.items()))
    return [max(1, threads[mask]) for mask in masks]
