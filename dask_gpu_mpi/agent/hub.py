"""The hub: one TLS listener of rank 0's agent, to which the agent of each other rank is connected for the whole job.

`Hub` is the side of rank 0, whose `lead.Leader` handles the messages; `connect` is called by the other agents (`part`).

Both ends must show the job's certificate. A message is its length and plain data (`base.plain_data`): nothing is unpickled.
The kernel notices a node that is down: it sends probes on a silent connection, and gives up after `NODE_LOST` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.timeouts import NODE_LOST
from dask_gpu_mpi.startup.meeting import BACKLOG
from dask_gpu_mpi.startup.messages import COORDINATOR, PAYLOADS, Event, Kind

_LENGTH = struct.Struct("<I")
#: Bytes of the largest message: a plan of all workers.
LARGEST = 64 << 20
#: Seconds for a visitor's TLS handshake and first message.
HANDSHAKE = 60.0
#: Errors of a connection whose other side no longer answers.
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def encode(kind: str, payload: Any) -> bytes:
    """A message as bytes."""
    data = pack([kind, payload])
    return _LENGTH.pack(len(data)) + data


class Connection:
    """One connection between an agent and the hub."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        if (sock := writer.get_extra_info("socket")) is not None:
            notice_loss(sock)

    async def receive(self) -> tuple[str, Any]:
        """The next message; EOFError, OSError: the connection has ended; PlainDataError: something else has come."""
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > LARGEST:
            raise PlainDataError(f"a message of {length} bytes")
        kind, payload = from_plain(tuple[str, Any], unpack(await self._reader.readexactly(length)))
        if kind not in PAYLOADS:
            raise PlainDataError(f"unknown kind {kind[:20]!r}")
        return kind, from_plain(PAYLOADS[kind], payload)

    @property
    def fd(self) -> int:
        """The descriptor of its socket."""
        number: int = self._writer.get_extra_info("socket").fileno()
        return number

    def send(self, data: bytes) -> None:
        """Send an encoded message; returns at once."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def flush(self, seconds: float) -> None:
        """Wait until all messages have left, so long at most."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                transport: Any = self._writer.transport
                # one that has ended already has no buffer to ask for
                while not transport.is_closing() and transport.get_write_buffer_size():
                    await asyncio.sleep(0.002)

    def close(self) -> None:
        """End it."""
        self._writer.close()


def notice_loss(sock: Any) -> None:
    """Let the kernel end a connection whose other node does not answer for `NODE_LOST` seconds."""
    # the kernel looks whether its time is over only when it sends a probe
    interval = max(1, int(NODE_LOST / 5))
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(NODE_LOST * 1000))


def tls_context(config: dict[str, Any], *, server: bool) -> ssl.SSLContext:
    """The TLS settings of one side, by the job's certificate in this Dask configuration: both sides must show it."""
    from distributed.security import Security

    pair = config["distributed.comm.tls.client"]
    security = Security(
        require_encryption=True,
        tls_ca_file=config["distributed.comm.tls.ca-file"],
        tls_client_cert=pair["cert"],
        tls_client_key=pair["key"],
        tls_scheduler_cert=pair["cert"],
        tls_scheduler_key=pair["key"],
    )
    arguments = security.get_listen_args("scheduler") if server else security.get_connection_args("client")
    context: ssl.SSLContext = arguments["ssl_context"]
    if server:
        # no process resumes a session; two tickets are a third of a handshake's CPU time
        context.num_tickets = 0
    return context


async def connect(hub: tuple[str, int], config: dict[str, Any], seconds: float) -> Connection:
    """A connection to the hub. OSError (of which TimeoutError is one): there is none within these seconds."""
    async with asyncio.timeout(seconds):
        context = tls_context(config, server=False)
        reader, writer = await asyncio.open_connection(*hub, ssl=context, ssl_handshake_timeout=HANDSHAKE)
    return Connection(reader, writer)


class Hub:
    """The connections of all ranks' agents; rank 0's own is a call (`local`).

    ``on_event(event)`` is called for each message, ``on_lost(rank)`` when a connection has ended.
    """

    def __init__(
        self,
        size: int,
        local: Callable[[str, Any], None],
        on_event: Callable[[Event], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._size = size
        self._local = local
        self._on_event = on_event
        self._on_lost = on_lost
        self.connections: dict[int, Connection] = {}
        #: Whether a node has stopped to answer.
        self.has_lost_node = False
        self._server: asyncio.Server | None = None
        self._loop = asyncio.get_running_loop()

    async def serve(self, sock: socket.socket, config: dict[str, Any]) -> None:
        """Accept the other agents at this listening socket."""
        self._server = await asyncio.start_server(
            self._welcome,
            sock=sock,
            ssl=tls_context(config, server=True),
            ssl_handshake_timeout=HANDSHAKE,
            backlog=BACKLOG,
        )

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the messages of one connection, whose first is ENTERED, until it ends; the rank is lost then."""
        connection = Connection(reader, writer)
        rank = -1
        try:
            async with asyncio.timeout(HANDSHAKE):
                kind, payload = await connection.receive()
            if kind != Kind.ENTERED or not 0 < payload[0] < self._size:
                return
            rank = payload[0]
            if (before := self.connections.get(rank)) is not None:
                before.close()
            self.connections[rank] = connection
            while True:
                self._on_event(Event(rank, kind, payload))
                kind, payload = await connection.receive()
        # It is cancelled at the end of the agent, of which asyncio would print a traceback.
        except (EOFError, PlainDataError, asyncio.CancelledError):
            pass
        except OSError as error:
            self.has_lost_node |= error.errno in SILENT
        finally:
            connection.close()
            if self.connections.get(rank) is connection:
                del self.connections[rank]
                self._on_lost(rank)

    def send(self, rank: int | None, kind: str, payload: Any = None) -> None:
        """Send a message to a rank's agent, if it is connected; None: to all."""
        if rank in (None, COORDINATOR):
            self._loop.call_soon(self._local, kind, payload)
        receivers = self.connections.keys() if rank is None else self.connections.keys() & {rank}
        data = encode(kind, payload) if receivers else b""
        for each in receivers:
            self.connections[each].send(data)

    def receive_local(self, kind: str, payload: Any = None) -> None:
        """A message of rank 0's own agent."""
        self._loop.call_soon(self._on_event, Event(COORDINATOR, kind, payload))

    async def close(self, seconds: float) -> None:
        """Close all connections, after their messages have left, and accept no others."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(each.flush(seconds) for each in self.connections.values()))
        for connection in self.connections.values():
            connection.close()
