"""Connections that are tested at the start, and which nodes connect to which."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import dask
import pytest
from distributed import Security
from distributed.comm.core import listen

from dask_gpu_mpi.network import reachability
from dask_gpu_mpi.network.credentials import MARGIN, make_credentials
from dask_gpu_mpi.network.reachability import (
    MOST_PARTS,
    MOST_PEERS,
    Node,
    connect_to_peers,
    connection_errors,
    connection_report,
    peers_by_rank,
    unreachable,
)

CONFIG = make_credentials()
OTHER = "something else answers there"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, dask_config: None) -> None:
    monkeypatch.setattr(reachability, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(reachability, "CONNECT_SHARE", 0.0)


@contextlib.asynccontextmanager
async def server(scheme: str, config: dict[str, Any], host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The address of a Dask server with these credentials."""

    async def handle(comm: Any) -> None:
        with contextlib.suppress(OSError):
            await comm.read()

    with dask.config.set(config):
        arguments = Security().get_listen_args("worker")
    async with listen(f"{scheme}://{host}:0", handle, **arguments) as listener:
        yield listener.contact_address


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_server_that_is_reached(scheme: str, host: str) -> None:
    config = CONFIG if scheme == "tls" else {}
    with dask.config.set(config):
        async with server(scheme, config, host) as address:
            assert await connection_errors([address, address]) == ["", ""]


async def test_a_server_of_another_job() -> None:
    async with server("tls", make_credentials()) as other, server("tcp", {}) as open_to_all:
        with dask.config.set(CONFIG):
            addresses = [other, open_to_all.replace("tcp", "tls")]
            assert await connection_errors(addresses) == [OTHER, OTHER]


async def test_a_certificate_that_has_expired() -> None:
    """Of a cluster to attach to."""
    now = time.time() - MARGIN - 60
    old = make_credentials(now=now, job_end=now + 1)
    with dask.config.set(old):
        async with server("tls", old) as address:
            (why,) = await connection_errors([address])
    error = unreachable("the scheduler", why)
    text = "could not reach the scheduler: the job's certificate has expired by the clock of "
    assert str(error).startswith(text)
    assert error.problem.what == "clocks"


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_nobody_answers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with dask.config.set(CONFIG if scheme == "tls" else {}), socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"{scheme}://127.0.0.1:{deaf.getsockname()[1]}"
        began = time.monotonic()
        assert await connection_errors([address] * 8) == ["no answer within 0.5 s"] * 8
        assert time.monotonic() - began < 4, "all at once"
        # many workers are given more time
        monkeypatch.setattr(reachability, "CONNECT_SHARE", 0.01)
        with dask.config.set({"distributed.comm.timeouts.connect": "60s"}):
            assert await connection_errors([address]) == ["no answer within 0.6 s"]
        deaf.close()
        assert await connection_errors([address]) == ["Connection refused"]
        began = time.monotonic()
        (why,) = await connection_errors([address], patient=True)
        assert time.monotonic() - began < 4, "at once"
    assert str(unreachable("rank 0", why)).startswith("could not reach rank 0: Connection refused. Fix: ")


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH\r\n", b"\0" * 64])
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_somebody_elses_listener(scheme: str, says: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await reader.read(4096)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as stranger:
        port = stranger.sockets[0].getsockname()[1]
        with dask.config.set(CONFIG if scheme == "tls" else {}):
            assert await connection_errors([f"{scheme}://127.0.0.1:{port}"]) == [OTHER]


async def test_peers_that_are_not_reached() -> None:
    async with server("tcp", {}) as address:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        closed = f"tcp://127.0.0.1:{port}"
        peers = [Node("h1", 0, address), Node("h2", 2, closed), Node("h3", 4, closed)]
        assert await connect_to_peers(peers) == {"Connection refused": ["h2", "h3"]}


def nodes(number: int) -> list[Node]:
    return [Node(f"h{i}", 2 * i, f"tls://10.0.0.{i}:5") for i in range(number)]


def pairs(number: int) -> Counter[tuple[int, int]]:
    found = peers_by_rank(nodes(number))
    return Counter((rank, peer.rank) for rank, peers in found.items() for peer in peers)


@pytest.mark.parametrize(
    "number", [2, 3, 16, MOST_PEERS + 1, *(MOST_PEERS + more for more in (2, 3, 4, 1000))]
)
def test_of_few_nodes_all_pairs_of_many_a_ring_and_a_sample(number: int) -> None:
    found = pairs(number)
    assert set(found.values()) == {1}
    assert all((b, a) in found for a, b in found), "both directions"
    assert all(a != b for a, b in found)
    assert all((2 * i, 2 * ((i + 1) % number)) in found for i in range(number)), "the ring"
    # as many to each node as from it: what bounds its sockets
    for side in (0, 1):
        assert set(Counter(pair[side] for pair in found).values()) == {min(MOST_PEERS, number - 1)}
    assert found == pairs(number), "the same in every run"


def test_nobodys_peers() -> None:
    """One node alone, and one whose workers have no address."""
    assert peers_by_rank(nodes(1)) == {0: ()}
    first, second, _ = nodes(3)
    found = peers_by_rank([first, second, Node("h2", 4, "")])
    assert found == {0: (second,), 2: (first,), 4: (first, second)}


def test_the_report_names_pairs_and_is_bounded() -> None:
    silent = "no answer within 5 s"
    several = connection_report({"a": {silent: ["h1", "h2"], "refused": ["h3"]}})
    assert several == f"from a to h[1-2] ({silent}), from a to h3 (refused)"
    many = connection_report({f"h{i}": {silent: [f"h{100 + i}"]} for i in range(40)})
    assert many.count("from ") == MOST_PARTS
    assert many.endswith(", and 34 more of this kind")
