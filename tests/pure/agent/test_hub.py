"""The hub and its visitors, over loopback: agents of the job, and those that are none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dask_gpu_mpi.agent import hub as module
from dask_gpu_mpi.agent.hub import LARGEST, Connection, Hub, connect, encode, notice_loss, tls_context
from dask_gpu_mpi.base.timeouts import NODE_LOST
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.startup.meeting import listen
from dask_gpu_mpi.startup.messages import Event, Kind

CONFIG, ANOTHER_JOB = make_credentials(), make_credentials()
ENTERED = encode(Kind.ENTERED, (1, False))


class Job:
    """A hub of three ranks, what it has heard, and its visitors. What it sends the ranks: test_lead."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.hub = Hub(
            3,
            lambda kind, payload: None,
            self.heard.put_nowait,
            lambda rank: self.heard.put_nowait(("lost", rank)),
        )
        self.address = ("127.0.0.1", 0)
        self.visitors: list[Any] = []

    async def agent(self, rank: int, *, again: bool = False) -> Connection:
        """The agent of a rank, which the hub has heard."""
        made = await connect(self.address, CONFIG, 10.0)
        self.visitors.append(made)
        made.send(encode(Kind.ENTERED, (rank, again)))
        assert await self.heard.get() == Event(rank, Kind.ENTERED, (rank, again))
        return made

    async def visit(
        self, context: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of anyone."""
        reader, writer = await asyncio.open_connection(*self.address, ssl=context)
        self.visitors.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def job() -> AsyncIterator[Job]:
    made = Job()
    sock = listen("127.0.0.1")
    made.address = sock.getsockname()[:2]
    await made.hub.serve(sock, CONFIG)
    try:
        yield made
    finally:
        await made.hub.close(1.0)
        for visitor in made.visitors:
            visitor.close()


async def ends(reader: asyncio.StreamReader) -> None:
    """The hub closes the connection."""
    with contextlib.suppress(OSError):  # an alert, or a reset
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass


async def is_lost(connection: Connection) -> bool:
    with contextlib.suppress(EOFError, OSError):
        async with asyncio.timeout(10):
            await connection.receive()
        return False
    return True


async def test_an_agent_that_ends_is_lost_once() -> None:
    async with job() as made:
        one = await made.agent(1)
        connection = made.hub.connections[1]
        one.close()
        assert await made.heard.get() == ("lost", 1)
        await connection.flush(1.0)  # as at the end, when agents leave while the hub closes
        connection.send(ENTERED)
        again = await made.agent(1, again=True)
        made.hub.send(1, Kind.RELEASE)
        assert await again.receive() == (Kind.RELEASE, None)
        assert made.heard.empty()


def stranger(config: dict[str, Any] | None) -> ssl.SSLContext:
    """TLS without the job's certificate, or with that of another."""
    context = ssl.create_default_context() if config is None else tls_context(config, server=False)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize(
    ("context", "data"),
    [
        (None, b"GET / HTTP/1.1\r\n\r\n"),
        (None, ENTERED),
        (stranger(None), ENTERED),
        (stranger(ANOTHER_JOB), ENTERED),
        (stranger(CONFIG), encode(Kind.ENTERED, (0, False))),
        (stranger(CONFIG), encode(Kind.ENTERED, (3, False))),
        (stranger(CONFIG), encode(Kind.ENTERED, (-1, False))),
        (stranger(CONFIG), encode(Kind.STEP, "first")),
        (stranger(CONFIG), encode("unknown", None)),
        (stranger(CONFIG), encode(Kind.ENTERED, "text")),
        (stranger(CONFIG), encode(Kind.STEP, 5)),
        (stranger(CONFIG), struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1"),
        (stranger(CONFIG), struct.pack("<I", LARGEST + 1)),
    ],
)
async def test_who_is_none_of_the_agents_is_not_heard(
    context: ssl.SSLContext | None, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is printed."""
    async with job() as made:
        reader, writer = await made.visit(context)
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        await ends(reader)
        await made.agent(1)
        assert made.heard.empty()
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "data", [encode("unknown", None), struct.pack("<I", LARGEST + 1), struct.pack("<I", 1) + b"\xc1"]
)
async def test_an_agent_that_sends_something_else_is_lost(data: bytes) -> None:
    async with job() as made:
        one = await made.agent(1)
        one.send(data)
        assert await is_lost(one)
        assert await made.heard.get() == ("lost", 1)


@pytest.mark.parametrize("context", [None, stranger(CONFIG)])
async def test_who_says_nothing_is_closed(
    context: ssl.SSLContext | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not an agent that has entered."""
    monkeypatch.setattr(module, "HANDSHAKE", 0.2)
    async with job() as made:
        one = await made.agent(1)
        reader, _ = await made.visit(context)
        await ends(reader)
        made.hub.send(1, Kind.RELEASE)
        assert await one.receive() == (Kind.RELEASE, None)
        assert made.heard.empty()


async def test_the_last_messages_leave_and_nobody_else_comes_in() -> None:
    """Within a time: an agent may read nothing."""
    large = "x" * 10_000_000
    async with job() as made:
        one, _ = await made.agent(1), await made.agent(2)
        reading = asyncio.ensure_future(one.receive())
        made.hub.send(None, Kind.STOP, large)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await made.hub.close(0.5)
        assert loop.time() - began < 5
        assert await reading == (Kind.STOP, large)
        assert await is_lost(one)
        with pytest.raises(OSError, match="Connect"):
            await connect(made.address, CONFIG, 10.0)


def test_the_kernel_gives_up_silent_connections_in_time() -> None:
    with socket.socket() as sock:
        notice_loss(sock)
        options = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_NODELAY")
        timeout, idle, interval, count, no_delay = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert timeout == 1000 * NODE_LOST
        assert 0.9 * NODE_LOST < idle + count * interval <= NODE_LOST
        assert no_delay
