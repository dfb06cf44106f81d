"""Tests of the network at the start: connections to the scheduler, and between workers of different nodes.

They are Dask's connections. With TLS both ends show the job's certificate, so that another program's listener is detected.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dask_gpu_mpi.base.text import fold_names
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.credentials import clock_problem

#: Seconds in which a connection must be made. If there are many workers, Dask's timeout grows with their number, and the test
#: gets this part of it.
CONNECT_TIMEOUT, CONNECT_SHARE = 5.0, 1 / 6
#: Errors of connections whose other end does not use Dask's protocol.
NOT_DASK = (ValueError, MemoryError, struct.error)
#: Nodes to which each node connects, and which connect to it, at most: a bound on its sockets, since all are tried at once.
MOST_PEERS = 16
#: Parts of a report that are listed; the others are counted.
MOST_PARTS = 6


async def connection_errors(addresses: Sequence[str], *, patient: bool = False) -> list[str]:
    """Connect to Dask servers, to all at once, and disconnect; returns the error of each, or an empty text.

    `patient`: they may be busy, and have Dask's whole timeout.
    """
    # Imported here and below: every rank imports this module before it starts its agent, and none of them tests anything.
    import asyncio

    import dask
    from dask.utils import parse_timedelta
    from distributed import Security
    from distributed.comm.addressing import parse_address
    from distributed.comm.registry import backends

    configured = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    limit = configured if patient else max(CONNECT_TIMEOUT, CONNECT_SHARE * configured)
    credentials = Security().get_connection_args("worker")

    async def error_of(address: str) -> str:
        scheme, place = parse_address(address)
        try:
            async with asyncio.timeout(limit):
                # as Dask's `connect`, which would try again until the time is over
                connector = backends[scheme].get_connector()
                comm = await connector.connect(place, deserialize=False, **credentials)
                await comm.write(comm.handshake_info())
                await comm.read()
            comm.abort()
        except (OSError, *NOT_DASK) as error:
            return _reason(error, limit)
        return ""

    return await asyncio.gather(*map(error_of, addresses))


def _reason(error: BaseException, limit: float) -> str:
    while error.__cause__ is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    if isinstance(error, TimeoutError):
        return f"no answer within {limit:g} s"
    if clock_problem(str(error)):
        return str(error)
    import ssl

    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
        return error.strerror
    return "something else answers there"


def unreachable(what: str, why: str, first: str = "") -> InputError:
    """The error of a rank that can't connect to a process of another node; `first`: an earlier part of the fix."""
    if problem := clock_problem(why):
        text, _, fix = problem.partition(". Fix: ")
        return InputError(f"could not reach {what}: {text}", fix=fix, what="clocks")
    return InputError(
        f"could not reach {what}: {why}",
        fix=f"{first}choose a network that leads there with interface (--interface), or open the ports between the nodes in the "
        "firewall",
        what="network",
    )


# Pairs of nodes. Workers of two nodes connect to each other in both directions, whichever node has the scheduler.


@dataclass(frozen=True)
class Node:
    """A node, and the rank that connects to others for it."""

    host: str
    rank: int
    #: Of one of its workers; empty: none is known.
    address: str


def _steps(nodes: int) -> list[int]:
    """The distances of a node's peers on a ring of all nodes.

    They are the same for all nodes, so each node has as many connections in as out, and each pair is tested in both directions.
    """
    if nodes - 1 <= MOST_PEERS:
        return list(range(1, nodes))
    drawn = random.Random(nodes).sample(range(2, (nodes + 1) // 2), MOST_PEERS // 2 - 1)
    return sorted({1, nodes - 1, *drawn, *(nodes - step for step in drawn)})


def peers_by_rank(nodes: Sequence[Node]) -> dict[int, tuple[Node, ...]]:
    """By rank the nodes to which each node connects: all others, or, of many, its neighbours on a ring and a random sample.

    The sample depends only on the number of nodes. Peers without an address are left out.
    """
    steps = _steps(len(nodes))
    peers = {}
    for number, node in enumerate(nodes):
        others = (nodes[(number + step) % len(nodes)] for step in steps)
        peers[node.rank] = tuple(peer for peer in others if peer.address)
    return peers


async def connect_to_peers(peers: Sequence[Node]) -> dict[str, list[str]]:
    """Connect to workers of all peers at once; returns by error the hosts that were not reached."""
    lost: dict[str, list[str]] = {}
    errors = await connection_errors([peer.address for peer in peers])
    for peer, error in zip(peers, errors, strict=True):
        if error:
            lost.setdefault(error, []).append(peer.host)
    return lost


def connection_report(lost: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The failures by host as text; hosts with the same peers and error share a part.

    >>> silent = {"no answer within 5 s": ["h3"]}
    >>> connection_report({"h1": silent, "h2": silent, "h3": {"no route to host": ["h1"]}})
    'from h[1-2] to h3 (no answer within 5 s), from h3 to h1 (no route to host)'
    """
    sources: dict[tuple[str, str], list[str]] = {}
    for source, missed in lost.items():
        for error, hosts in missed.items():
            sources.setdefault((fold_names(hosts), error), []).append(source)
    parts = [
        f"from {fold_names(hosts)} to {targets} ({error})" for (targets, error), hosts in sources.items()
    ]
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more of this kind"]
    return ", ".join(parts)
