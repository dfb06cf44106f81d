"""An intruder: a program that tries to get into a job's listening sockets, as another user and perhaps from another host.

It reads what to do from standard input, as JSON in one line (`jobs.attacked`), and after each group of attacks prints
what came of it, as ``[[attack, target, outcome], ...]``. An outcome begins with ``"in"`` where somebody was let in,
else with ``"out"``. Everything is bounded: in number, in bytes and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pwd
import random
import resource
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import dask
import msgpack
from distributed import Client, Security, Worker, protocol
from distributed.comm.tcp import _add_frames_header
from distributed.core import connect

from dask_gpu_mpi.agent.hub import encode
from dask_gpu_mpi.mpi.world import MpiWorld
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.worker_comm import use_ucx_between_workers
from dask_gpu_mpi.startup.messages import Kind

#: Seconds for one connection, for one of Dask's own attempts, and for each of those that hold on.
PATIENCE, DASKS_PATIENCE, HELD = 3.0, 3.0, 6.0
#: Seconds after which who has not refused a TLS connection has let it in.
WAITS = 10.0
#: Connections to each target that are held open, that are closed at once, and that send a byte a second.
HALF_OPEN, CLOSED, SLOW = 100, 200, 3
#: Lengths of garbage: every class up to 64 KiB, at the borders of what protocols read at once, and some between.
LENGTHS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 32, 33),
    *(2**power + more for power in range(6, 17) for more in (-1, 0, 1)),
)
#: How a TLS connection begins (a record that holds a ClientHello), HTTP, Open MPI's TCP component, and Dask's prelude.
BEGINNINGS = (b"", b"\x16\x03\x01", b"GET /", b"\0" * 8, struct.pack("<Q", 64))
#: What Open MPI's ranks show each other, after jobid and rank: 24 bytes in all.
MAGIC = b"OPAL-TCP-BTL".ljust(16, b"\0")
#: What its component for messages (ob1) calls a message that fits into one piece.
ONE_MESSAGE = 0x41
#: Its packets that hold a message, and those that say themselves where in the receiver's memory their contents belong.
SEND, PUT = 1, 2
#: The first byte of a TLS record that refuses.
ALERT = 0x15
#: What an intruder writes over another process's memory.
MARK = b"An intruder has been here."
#: How UCX's TCP transport begins a connection, and what its packets are called that are no active messages: about the connection,
#: a write to an address, and its acknowledgement (uct/tcp/tcp.h). What a packet about the connection says: requested, accepted.
UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
UCX_CONNECTION, UCX_WRITE, UCX_WRITTEN = 32, 33, 34
REQUESTED, ACCEPTED = 1, 2
#: UCX's active messages: about an endpoint, a request for memory, and the memory (ucp/core/ucp_types.h).
UCX_WIREUP, UCX_READ, UCX_MEMORY = 1, 18, 19


class Bomb:
    """Whoever unpickles it creates a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return eval, (f"open({self.marker!r}, 'a').close()",)


def framed(message: Any) -> bytes:
    """A message as Dask sends it."""
    frames, *_ = _add_frames_header(list(protocol.dumps(message)))
    return b"".join(map(bytes, frames))


def bombs(marker: str) -> dict[str, bytes]:
    """What creates the file `marker` where it is unpickled, and what takes memory or depth where it is unpacked."""
    bomb = Bomb(marker)
    deep = b"\x91" * 100_000  # lists in lists
    return {
        "pickle": protocol.pickle.dumps(bomb),
        "pickle in a handshake": framed(
            {"compression": protocol.ToPickle(bomb), "python": (3,), "pickle-protocol": 5}
        ),
        "pickle in an operation": framed({"op": "identity", "reply": protocol.ToPickle(bomb)}),
        "to be deserialised": framed({"op": "identity", "reply": protocol.Serialize(bomb)}),
        "deep msgpack": struct.pack("<QQQ", 16 + len(deep), 1, len(deep)) + deep,
        "long msgpack": struct.pack("<QQQ", 21, 1, 5) + b"\xdd\xff\xff\xff\xff",
        "a frame of 8 EiB": struct.pack("<Q", 2**63 - 1),
        "an impossible number of frames": struct.pack("<QQ", 8, 2**60),
        "an agent's first message": encode(Kind.ENTERED, (1, False)),
        "an agent's loss": encode(Kind.ENTERED, (1, True)) + encode(Kind.GONE, None),
        "a message of 4 GiB": struct.pack("<I", 2**32 - 1),
        "an extension type": struct.pack("<QQQ", 24, 1, 8) + msgpack.packb(msgpack.ExtType(42, b"12345"))[:8],
    }


def connection(target: dict[str, Any], timeout: float = PATIENCE) -> socket.socket:
    """A connection to the target."""
    return socket.create_connection((target["host"], target["port"]), timeout)


def answer_to(stream: socket.socket, data: bytes, timeout: float = PATIENCE, most: int = 4096) -> bytes:
    """What comes back until the other side hangs up or falls silent."""
    got = b""
    with contextlib.suppress(OSError):
        stream.settimeout(timeout)
        stream.sendall(data)
        with contextlib.suppress(OSError):
            stream.shutdown(socket.SHUT_WR)
        while len(got) < most and (piece := stream.recv(most)):
            got += piece
    return got


def judged(target: dict[str, Any], got: bytes) -> str:
    """Whether this answer lets somebody in."""
    if target["kind"] == "http":
        status = got[:12].decode(errors="replace")
        return f"in: {status}" if status.startswith("HTTP/1.1 2") else "out"
    if target["kind"] == "mpi":  # which may answer; what it does with it the job's files tell
        return f"out: {len(got)} bytes"
    return "out" if not got or got[0] == ALERT else f"in: {got[:40]!r}"


def worst(outcomes: Sequence[str]) -> str:
    """Of many attempts the one that got furthest."""
    inside = [outcome for outcome in outcomes if outcome.startswith("in")]
    return inside[0] if inside else f"out: all {len(outcomes)}"


def worst_of(target: dict[str, Any], pieces: Iterable[bytes], timeout: float) -> str:
    """Send each of these by a connection of its own."""
    outcomes = []
    for data in pieces:
        with connection(target) as stream:
            outcomes.append(judged(target, answer_to(stream, data, timeout)))
    return worst(outcomes)


def plain_tcp(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Dask's handshake and an operation without TLS, or HTTP."""
    hello = framed({"compression": None, "python": (3, 11, 0), "pickle-protocol": 5})
    asks = hello + framed({"op": "identity", "reply": True})
    return worst_of(target, (b"", hello, asks, b"GET / HTTP/1.0\r\n\r\n"), 1.0)


def any_connection(target: dict[str, Any], order: dict[str, Any]) -> str:
    """A TCP connection, which is all that a port needs that has no authentication."""
    with connection(target):
        return "in: accepted"


def garbage(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Random bytes of every length, after the beginning of each protocol."""
    chance = random.Random(target["port"])
    lengths = [*LENGTHS, *(chance.randrange(1, 65536) for _ in range(10))]
    begins = itertools.cycle(BEGINNINGS)
    pieces = ((next(begins) + chance.randbytes(length))[:length] for length in lengths)
    return worst_of(target, pieces, 0.3)


def bombs_by_tcp(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Pickles and msgpack that should never be read."""
    return worst_of(target, bombs(order["marker"]).values(), 0.5)


def half_open(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Many connections that say nothing, held for some seconds."""
    connection(target).close()
    streams: list[socket.socket] = []
    until = time.monotonic() + HELD
    try:
        for _ in range(HALF_OPEN):
            stream = socket.socket()
            stream.setblocking(False)
            streams.append(stream)
            with contextlib.suppress(BlockingIOError):
                stream.connect((target["host"], target["port"]))
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        for stream in streams:
            stream.close()
    return f"out: {len(streams)} connections"


def slow(target: dict[str, Any], order: dict[str, Any]) -> str:
    """A byte a second, of what would be the beginning of a TLS connection, of HTTP, and of Dask's messages."""
    outcomes = []
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connection(target)) for _ in range(SLOW)]
        for second in range(int(HELD)):
            for stream, data in zip(
                streams, (b"\x16\x03\x01\x02\0\x01\0\x01", b"GET / HTTP", b"\x40\0\0\0\0\0\0\0"), strict=True
            ):
                with contextlib.suppress(OSError):
                    stream.sendall(data[second : second + 1])
            time.sleep(1.0)
        for stream in streams:
            stream.settimeout(0.1)
            with contextlib.suppress(OSError):
                outcomes.append(judged(target, stream.recv(4096)))
    return worst(outcomes)


def closing(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Connections that are closed at once, half of them by a reset."""
    for number in range(CLOSED):
        with connection(target) as stream:
            if number % 2:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return f"out: {CLOSED} connections"


def replayed(target: dict[str, Any], order: dict[str, Any]) -> str:
    """What a client of this job sent, or to the hub an agent, TLS and all, once more, at once and in pieces.

    Files of the job tell what came of it.
    """
    outcomes = []
    for text in order["recorded_at_hub" if target["role"] == "hub" else "recorded"]:
        data = bytes.fromhex(text)
        for step in (len(data), 517):
            last = (len(data) - 1) // step * step
            with contextlib.suppress(ConnectionError, TimeoutError), connection(target) as stream:
                for begin in range(0, last, step):
                    stream.sendall(data[begin : begin + step])
                    time.sleep(0.02)
                answer_to(stream, data[last:], 1.0, 1 << 20)
            outcomes.append("out")
    return worst(outcomes)


def by_tls(target: dict[str, Any], order: dict[str, Any], *certificate: str) -> str:
    """Believes whatever the other side shows, so that the refusal must be the other side's; sends messages at once."""
    hello = framed({"compression": None, "python": (3, 11, 0), "pickle-protocol": 5})
    messages = [b"", hello + framed({"op": "identity", "reply": True}), *bombs(order["marker"]).values()]
    outcomes = []
    for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = newest
        if certificate:
            with tempfile.NamedTemporaryFile("w") as file:
                file.write("".join(certificate))
                file.flush()
                context.load_cert_chain(file.name)
        for data in messages:
            outcome = "out"
            with (
                connection(target) as plain,
                contextlib.suppress(OSError),
                context.wrap_socket(plain) as stream,
            ):
                stream.settimeout(WAITS)
                try:
                    stream.sendall(data)
                    if got := stream.recv(4096):
                        outcome = f"in: {got[:40]!r}"
                except TimeoutError:  # nobody hangs up, so somebody waits for more
                    outcome = "in: silent"
            outcomes.append(outcome)
    return worst(outcomes)


def self_made_authority(target: dict[str, Any], order: dict[str, Any]) -> str:
    """With a certificate and an authority of the intruder's own, both sent along."""
    return by_tls(target, order, *key_and_certificates(make_credentials()))


def key_and_certificates(made: dict[str, Any]) -> tuple[str, str, str]:
    """The key, its certificate and the authority's."""
    pair = made["distributed.comm.tls.worker"]
    return pair["key"], pair["cert"], made["distributed.comm.tls.ca-file"]


def another_jobs(target: dict[str, Any], order: dict[str, Any]) -> str:
    """With the certificate of another job."""
    return by_tls(target, order, *order["another_job"][:2])


def possessions() -> list[tuple[str, Security | None]]:
    """Address scheme and credentials that an intruder may have: none, and another job's."""
    with dask.config.set(make_credentials()):
        return [("tcp", None), ("tls", Security())]


async def asks(target: dict[str, Any], scheme: str, security: Security | None, **more: Any) -> Any:
    """As any process of Dask asks another who it is; `more` goes along."""
    arguments = security.get_connection_args("client") if security else {}
    comm = await connect(f"{scheme}://{target['host']}:{target['port']}", DASKS_PATIENCE, **arguments)
    await comm.write({"op": "identity", "reply": True, **more})
    found = await asyncio.wait_for(comm.read(), DASKS_PATIENCE)
    comm.abort()
    return str(found)[:60]


async def as_client(target: dict[str, Any], scheme: str, security: Security | None) -> Any:
    """A client that submits a task."""
    address = f"{scheme}://{target['host']}:{target['port']}"
    async with Client(address, asynchronous=True, timeout=DASKS_PATIENCE, security=security) as client:
        return await asyncio.wait_for(client.submit(sum, [1]), DASKS_PATIENCE)


async def as_worker(target: dict[str, Any], scheme: str, security: Security | None) -> Any:
    """A worker that registers itself, to get tasks and their data."""
    address = f"{scheme}://{target['host']}:{target['port']}"
    how: dict[str, Any] = {"dashboard": False, "nthreads": 1, "name": "intruder", "security": security}
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(address, local_directory=folder, **how)
        try:
            await asyncio.wait_for(worker.start(), 2 * DASKS_PATIENCE)
            return "registered"
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(worker.close(nanny=False), DASKS_PATIENCE)


async def outcome_of(attempt: Coroutine[Any, Any, Any]) -> str:
    """What came of one of these."""
    try:
        return f"in: {await attempt}"
    except (OSError, TimeoutError, RuntimeError, ValueError) as error:
        return f"out: {type(error).__name__}"


def worst_in_dask(target: dict[str, Any], attempts: Callable[..., Any]) -> str:
    """Make attempts by these functions, to which others come at a scheduler, all at once."""

    async def all_ways() -> list[str]:
        ways = [asks, as_client, as_worker] if target["role"] == "scheduler" else [asks]
        return await asyncio.gather(*map(outcome_of, attempts(ways)))

    with dask.config.set({"distributed.comm.timeouts.connect": DASKS_PATIENCE}):
        return worst(asyncio.run(all_ways()))


def as_process_of_dask(target: dict[str, Any], order: dict[str, Any]) -> str:
    """As client, as worker, and as any other, without credentials and with another job's."""
    having = possessions()
    return worst_in_dask(target, lambda ways: [way(target, *each) for each in having for way in ways])


def without_the_secret(target: dict[str, Any], order: dict[str, Any]) -> str:
    """A process of Dask over UCX, as its packages make one: it knows no secret."""
    # unpickled where it is read
    bomb = protocol.ToPickle(Bomb(order["marker"]))
    bombed = partial(asks, bomb=bomb)
    return worst_in_dask(target, lambda ways: [way(target, "ucx", None) for way in (bombed, *ways)])


def with_ucx_of_another_job(target: dict[str, Any], order: dict[str, Any]) -> str:
    """A worker of another job, which offers UCX beside TLS as those of this job do."""
    use_ucx_between_workers(1, loopback=True)
    return asyncio.run(outcome_of(asks(target, *possessions()[1])))


def http_routes(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Every route, without the token, with a wrong one, and by another method."""
    outcomes = []
    for route in order["routes"]:
        for query, method in (("", "GET"), ("?token=" + "0" * 48, "GET"), ("", "POST")):
            head = f"{method} {route}{query} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            with connection(target) as stream, contextlib.suppress(OSError):
                stream.settimeout(1.0)
                stream.sendall(head.encode())
                outcomes.append(f"{judged(target, stream.recv(4096))} {method} {route}{query}")
    return worst(outcomes)


def forged(marker: str, source: int) -> bytes:
    """Messages between ranks, as Open MPI sends them by TCP: whatever number is expected next, on each communicator there may be.

    Before each its header: what it is, its kind, segments, length; then kind, flags, communicator, source, tag, number.
    """
    payload = protocol.pickle.dumps(("stop", Bomb(marker)))
    messages = []
    for communicator in range(3, 7):
        for number in range(40):
            match = struct.pack("<BBHiiH", ONE_MESSAGE, 0, communicator, source, MpiWorld.TAG, number)
            messages.append(
                struct.pack("<BBHI", ONE_MESSAGE, SEND, 0, len(match) + len(payload)) + match + payload
            )
    return b"".join(messages)


def put(address: int, data: bytes) -> bytes:
    """A packet of Open MPI by TCP that its receiver writes to this address, without more ado: header, place, contents."""
    return struct.pack("<BBHIQQ", 0, PUT, 1, len(data), address, len(data)) + data


def ranks_handshake(target: dict[str, Any], order: dict[str, Any]) -> str:
    """The 24 bytes with which a rank of Open MPI connects; where they are answered, packets in the name of that rank.

    Open MPI ends the job when such a connection is closed: it stays open until the test has looked at the job.
    """
    outcomes = []
    for jobid, rank in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 2**32 - 1)):
        for magic in (MAGIC, bytes(16)):
            stream = connection(target)
            order["open"].append(stream)
            with contextlib.suppress(OSError):
                stream.settimeout(1.0)
                stream.sendall(struct.pack("!II", jobid, rank) + magic)
                got = stream.recv(24)
                if len(got) == 24:
                    stream.sendall(put(target["memory"], MARK) + forged(order["marker"], rank))
                outcomes.append(judged(target, got))
    return worst(outcomes)


class UcxPeer:
    """A peer of UCX's TCP transport, which asks nobody who they are: it knows the port alone."""

    def __init__(self, target: dict[str, Any]) -> None:
        self.stream = connection(target)
        self.read = self.stream.makefile("rb")
        # the address of a listener of our own, by which UCX tells its peers apart; nobody needs to listen there
        self.host, self.port = self.stream.getsockname()
        address = (
            struct.pack("<H", socket.AF_INET) + struct.pack("!H", self.port) + socket.inet_aton(self.host)
        )
        request = struct.pack("<IBQ", REQUESTED, 0, 0) + address.ljust(16, b"\0")
        self.stream.sendall(UCX_MAGIC)
        self.send(UCX_CONNECTION, request)
        self.wait_for(UCX_CONNECTION)

    def __enter__(self) -> UcxPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.read.close()
        self.stream.close()

    def send(self, kind: int, data: bytes, behind: bytes = b"") -> None:
        """Send a packet: its kind, its length, its contents."""
        self.stream.sendall(struct.pack("<BI", kind, len(data)) + data + behind)

    def wait_for(self, kind: int) -> bytes:
        """The next packet of this kind; the other side's own request to connect is granted on the way."""
        while head := self.read.read(5):
            found, length = struct.unpack("<BI", head)
            data = self.read.read(length)
            if found == UCX_CONNECTION and data[0] & REQUESTED:
                self.send(UCX_CONNECTION, struct.pack("<I", ACCEPTED))
            if found == kind:
                return data
        raise ConnectionResetError("hung up")

    def fetch(self, address: int, length: int) -> bytes:
        """The other process's memory at this address: it makes an endpoint for us, and answers through that."""
        nobody, any_id = 0, 1
        self.send(UCX_WIREUP, struct.pack("<BBHQQ", 1, 0, 0, any_id, nobody) + self.own_address())
        (endpoint,) = struct.unpack_from("<Q", self.wait_for(UCX_WIREUP), 4)
        host_memory = 0
        self.send(UCX_READ, struct.pack("<QQQQI", address, length, endpoint, any_id, host_memory))
        return self.wait_for(UCX_MEMORY)[16:]

    def write(self, address: int, data: bytes) -> None:
        """Write into the other process's memory: the transport itself does it, and needs no endpoint for it."""
        self.send(UCX_WRITE, struct.pack("<QQI", address, len(data), 0), behind=data)
        self.wait_for(UCX_WRITTEN)

    def own_address(self) -> bytes:
        """What UCX exchanges about a process, version 2: here one device with one transport, TCP (ucp/wireup/address.c)."""
        device = self.own_device()
        overhead, bandwidth, latency, priority, segment = 0x40, 0x40, 0x40, 0, 128
        to_interface, active_messages, wakes = 1, 2, 128
        return b"".join(
            (
                struct.pack("<BBQ", 1, 2, random.getrandbits(64)),  # version, "has an id", a process's id
                struct.pack("<BB", 0, len(device) | 0x80) + device,  # 0x80: it is the last one
                struct.pack("<H", crc16(b"tcp")),
                struct.pack("<BBBBH", overhead, bandwidth, latency, priority, segment),
                struct.pack("<HB", to_interface | active_messages | wakes, 0),
                struct.pack("<B", 2 | 0x80) + struct.pack("!H", self.port),
            )
        )

    def own_device(self) -> bytes:
        """An IPv4 address; for loopback's, which host and which network of it (uct/tcp/tcp_iface.c)."""
        if not self.host.startswith("127."):
            return struct.pack("<BB", 0, socket.AF_INET) + socket.inet_aton(self.host)
        with open("/proc/sys/kernel/random/boot_id") as file:
            one, two, three, four, five = file.read().strip().split("-")
        low = int(one, 16) | int(two, 16) << 32 | int(three, 16) << 48
        high = int(four, 16) | int.from_bytes(bytes.fromhex(five), "little") << 16
        host, network = (low ^ high) & ~(1 << 63), os.stat("/proc/self/ns/net").st_ino
        if network == 0xF0000080:  # the first network of a host is not told
            return struct.pack("<BBQQ", 1, socket.AF_INET, host, 0)
        return struct.pack("<BBQQ", 1, socket.AF_INET, host | 1 << 63, network)


def crc16(data: bytes) -> int:
    """By which UCX calls its transports: CRC-16-CCITT."""
    value = 0xFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x8408 if value & 1 else 0)
    return value ^ 0xFFFF


def memory_by_ucx(target: dict[str, Any], order: dict[str, Any]) -> str:
    """Writes into the process's memory by UCX's TCP transport, and reads it."""
    done = []
    with contextlib.suppress(OSError), UcxPeer(target) as peer:
        peer.write(target["memory"], MARK)
        done.append("wrote")
        done.append(f"read {peer.fetch(target['memory'], 64).hex()}")
    if not done:
        connection(target).close()  # raises where nobody listens
    return f"in: {', '.join(done)}" if done else "out"


#: Attacks by name. Which of them are tried on which kind of target is the test's to say.
ATTACKS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "any connection": any_connection,
    "plain TCP": plain_tcp,
    "TLS without a certificate": by_tls,
    "a self-made authority": self_made_authority,
    "another job's certificate": another_jobs,
    "a process of Dask": as_process_of_dask,
    "UCX without the secret": without_the_secret,
    "replayed": replayed,
    "pickle and msgpack bombs": bombs_by_tcp,
    "garbage of every length": garbage,
    "closed at once": closing,
    "a byte a second": slow,
    "half-open connections": half_open,
    "a worker of another job, with UCX": with_ucx_of_another_job,
    "routes without the token": http_routes,
    "a rank's handshake": ranks_handshake,
    "memory by UCX": memory_by_ucx,
}


def tried(attack: str, target: dict[str, Any], order: dict[str, Any]) -> str:
    """What became of an attack."""
    try:
        return ATTACKS[attack](target, order)
    except ConnectionRefusedError:
        return "out: nobody listens"
    except OSError as error:
        return f"out: {error}"


def become(user: str) -> None:
    """Run as this user from here on. Everything that is needed has been imported: its files may be closed to that user."""
    found = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(found.pw_gid)
    os.setuid(found.pw_uid)


def main() -> None:
    """Read what is to be tried, one group of attacks after the other, all of a group at once; tell what came of it."""
    order = json.loads(sys.stdin.readline())
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX prints warnings
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if order["user"]:
        become(order["user"])
    tempfile.tempdir = "/tmp"  # which everybody may write, unlike a job's own
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        os.chdir(folder)
        order["another_job"] = key_and_certificates(make_credentials())
        order["open"] = []  # connections that stay open until the test has looked at the job
        targets = {each["name"]: each for each in order["targets"]}
        for group in order["groups"]:
            pairs = [(attack, name) for attack, names in group.items() for name in names]
            with ThreadPoolExecutor(max(1, len(pairs))) as pool:
                found = pool.map(lambda pair: tried(pair[0], targets[pair[1]], order), pairs)
                told = [[*pair, what] for pair, what in zip(pairs, found, strict=True)]
                print(json.dumps(told), file=results, flush=True)
            sys.stdin.readline()  # until the test has looked at the job
            while order["open"]:
                order["open"].pop().close()


if __name__ == "__main__":
    main()
