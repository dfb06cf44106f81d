"""Which nodes try UCX with which others, and what each needs for that: kept by rank 0."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

from .ucx import UcxPeer

__all__ = ["UcxPairs"]


class UcxPairs:
    """Each node with the next one, in a ring, as the workers of a job do.

    Parameters
    ----------
    hosts : mapping
        The host of each rank that tries, one of each node.

    Examples
    --------
    >>> pairs = UcxPairs({0: "h1", 2: "h2"})
    >>> pairs.peers_of(0)
    1
    >>> list(pairs.add(2, b"two"))
    []
    >>> [(rank, peer.host, peer.address) for rank, peer in pairs.add(0, b"one")]
    [(0, 'h2', b'two'), (2, 'h1', b'one')]
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = dict(hosts)
        ring = [*self._hosts]
        following = ring[1:] + ring[:1]
        self._pairs = {frozenset(pair) for pair in zip(ring, following, strict=True) if pair[0] != pair[1]}
        self._addresses: dict[int, bytes] = {}

    def peers_of(self, rank: int) -> int:
        """With how many nodes this rank tries it."""
        return sum(rank in pair for pair in self._pairs)

    def add(self, rank: int, address: bytes) -> Iterator[tuple[int, UcxPeer]]:
        """Take the address of a rank; which ranks are to be sent which peers now, since both are known."""
        if rank not in self._hosts or rank in self._addresses:
            return
        self._addresses[rank] = address
        for pair in self._pairs:
            if rank in pair and pair <= self._addresses.keys():
                (other,) = pair - {rank}
                there, back = secrets.randbits(64), secrets.randbits(64)
                works = bool(address and self._addresses[other])
                for one, two, sends, receives in ((rank, other, there, back), (other, rank, back, there)):
                    known = self._addresses[two] if works else b""
                    yield one, UcxPeer(self._hosts[two], known, sends, receives)
