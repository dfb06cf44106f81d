"""Whether the nodes reach each other: which pairs are tested, a listener on each node, and connections from each to others.

Workers of two nodes connect to each other, in both directions, whichever node has the scheduler.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.options.model import Options

from .reachability import CONNECT_TIMEOUT, Listener, Tokens, connect_to

__all__ = [
    "MOST_AT_START",
    "MOST_IN_CHECK",
    "Lost",
    "Node",
    "connect_to_peers",
    "connection_report",
    "count_pairs",
    "listen_for_peers",
    "peers_by_rank",
    "worker_ports",
]

#: Nodes to which each node connects, and which connect to it, at most: a bound on its sockets, and all of them are tried at once.
MOST_AT_START, MOST_IN_CHECK = 16, 64
#: Parts of a report that are spelled out; the others are counted.
MOST_PARTS = 6
#: Ports of a range that are tried.
MOST_PORTS = 1000


@dataclass(frozen=True)
class Node:
    """One node of the job, and where its lowest rank with workers listens."""

    host: str
    rank: int
    #: Where its workers would listen.
    address: str
    #: Of this node alone: another node may have the same address on a network that leads nowhere.
    tokens: Tokens = field(default_factory=Tokens)
    #: 0: it can't listen.
    port: int = 0


@dataclass(frozen=True)
class Lost:
    """A node that did not answer."""

    host: str
    error: str


def _steps(nodes: int, most: int) -> list[int]:
    """How far along a ring of all nodes each node's peers are.

    The same steps for all nodes: so as many connect to each node as it connects to, and each pair is tested in both directions.
    """
    if nodes - 1 <= most:
        return list(range(1, nodes))
    drawn = random.Random(nodes).sample(range(2, (nodes + 1) // 2), most // 2 - 1)
    return sorted({1, nodes - 1, *drawn, *(nodes - step for step in drawn)})


def count_pairs(nodes: int, most: int) -> tuple[int, int]:
    """Pairs of nodes that are tested, and all pairs.

    >>> count_pairs(3, 64), count_pairs(65, 64), count_pairs(1000, 64)
    ((3, 3), (2080, 2080), (32000, 499500))
    """
    return nodes * len(_steps(nodes, most)) // 2, nodes * (nodes - 1) // 2


def peers_by_rank(nodes: Sequence[Node], most: int) -> dict[int, tuple[Node, ...]]:
    """To which nodes each node connects: all others, or, of many, its neighbours on a ring and a random sample.

    Parameters
    ----------
    nodes : sequence of Node
        In an order that is the same for the same job: the sample depends on nothing but their number.
    most : int
        Peers of each node at most; even.

    Returns
    -------
    dict
        By rank; without peers that can't listen.
    """
    steps = _steps(len(nodes), most)
    peers = {}
    for number, node in enumerate(nodes):
        others = (nodes[(number + step) % len(nodes)] for step in steps)
        peers[node.rank] = tuple(peer for peer in others if peer.port)
    return peers


def connect_to_peers(peers: Sequence[Node], timeout: float = CONNECT_TIMEOUT) -> tuple[Lost, ...]:
    """Connect to all peers at once; those that do not answer.

    Parameters
    ----------
    timeout : float
        As `connect_to`.
    """
    if not peers:
        return ()
    with ThreadPoolExecutor(len(peers)) as pool:
        reaches = pool.map(lambda peer: connect_to(peer.address, peer.port, peer.tokens, timeout), peers)
        return tuple(
            Lost(peer.host, reach.error) for peer, reach in zip(peers, reaches, strict=True) if reach.error
        )


def connection_report(lost: Mapping[str, Sequence[Lost]]) -> str:
    """Which nodes, by host, do not reach which; those with the same peers and error share a part.

    >>> silent = [Lost("h3", "no answer within 5 s")]
    >>> connection_report({"h1": silent, "h2": silent, "h3": [Lost("h1", "no route to host")]})
    'from h[1-2] to h3 (no answer within 5 s), from h3 to h1 (no route to host)'
    """
    sources: dict[tuple[str, str], list[str]] = {}
    for source, targets in lost.items():
        for error in dict.fromkeys(one.error for one in targets):
            folded = fold_names(one.host for one in targets if one.error == error)
            sources.setdefault((folded, error), []).append(source)
    parts = [
        f"from {fold_names(hosts)} to {targets} ({error})" for (targets, error), hosts in sources.items()
    ]
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more of this kind"]
    return ", ".join(parts)


def worker_ports(options: Options) -> Sequence[int]:
    """The ports that the user allows workers (``worker_port``, or ``port`` where there is no nanny); ``(0,)``: any.

    A firewall may let exactly these through.

    >>> worker_ports(Options(worker_options={"worker_port": "40000:40002"}))
    range(40000, 40003)
    """
    chosen = options.worker_options.get("worker_port")
    if chosen is None and options.worker_class == "distributed.Worker":
        chosen = options.worker_options.get("port")
    try:
        first, _, last = str(chosen or 0).partition(":")
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    # otherwise the worker's own error is the better one
    return ports[:MOST_PORTS] if ports and 0 <= ports[0] <= ports[-1] < 1 << 16 else (0,)


def listen_for_peers(address: str, ports: Sequence[int], tokens: Tokens) -> Listener:
    """Listen on the first port that is free.

    Raises
    ------
    OSError
        None is.
    """
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return Listener(address, port, tokens)
    return Listener(address, ports[-1], tokens)
