"""Which workers make a gang, and their ranks: the workers of a node have neighbouring ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_gpu_mpi.base.names import natural

__all__ = ["Candidate", "Member", "choose", "rank_members"]


@dataclass(frozen=True)
class Candidate:
    """A worker that is connected."""

    name: str
    address: str
    #: The host of its address.
    node: str
    #: The address of its nanny; None: it has none.
    nanny: str | None = None
    #: Whether it has the resource ``GPU``.
    has_gpu: bool = False


@dataclass(frozen=True)
class Member:
    """A worker as a member of a gang."""

    rank: int
    worker: Candidate
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int


def choose(wanted: Sequence[str] | None, workers: Iterable[Candidate]) -> tuple[list[str], list[str]]:
    """The names of the workers that a call means, and what it names that is not there.

    Parameters
    ----------
    wanted : sequence of str or None
        Names or addresses. None: all workers with a GPU, and where there are none, all workers.

    Examples
    --------
    >>> there = [Candidate("0", "tls://h1:1", "h1"), Candidate("1", "tls://h1:2", "h1")]
    >>> choose(None, there), choose(["tls://h1:2", "7"], there)
    ((['0', '1'], []), (['1'], ['7']))
    """
    workers = list(workers)
    if wanted is None:
        with_gpu = [worker.name for worker in workers if worker.has_gpu]
        return with_gpu or [worker.name for worker in workers], []
    known = {worker.name: worker.name for worker in workers} | {
        worker.address: worker.name for worker in workers
    }
    names = dict.fromkeys(known[name] for name in wanted if name in known)
    return list(names), [name for name in wanted if name not in known]


def rank_members(workers: Iterable[Candidate]) -> list[Member]:
    """Their ranks: node by node, in the order of the first name on each, and by name within a node.

    >>> names = {"0-1": "h2", "0-0": "h2", "10-0": "h1", "2-0": "h3"}
    >>> members = rank_members(Candidate(name, "", node) for name, node in names.items())
    >>> [(member.worker.name, member.local_rank, member.node_rank) for member in members]
    [('0-0', 0, 0), ('0-1', 1, 0), ('2-0', 0, 1), ('10-0', 0, 2)]
    """
    nodes: dict[str, list[Candidate]] = {}
    for worker in sorted(workers, key=lambda worker: natural(worker.name)):
        nodes.setdefault(worker.node, []).append(worker)
    placed = list(_places(nodes))
    return [Member(rank, *place) for rank, place in enumerate(placed)]


def _places(nodes: Mapping[str, Sequence[Candidate]]) -> Iterable[tuple[Candidate, int, int, int, int]]:
    for node_rank, there in enumerate(nodes.values()):
        for local_rank, worker in enumerate(there):
            yield worker, local_rank, len(there), node_rank, len(nodes)
