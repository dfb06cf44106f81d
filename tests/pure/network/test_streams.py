"""Sockets for large frames between workers: what goes over them, and what others can do to them.

tests/hosts has jobs on several hosts, tests/intruders strangers, tests/gpu memory of GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import dask.config
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.comm import CommClosedError, connect, registry
from distributed.comm.tcp import TLS
from distributed.protocol import dask_deserialize, dask_serialize, to_serialize

from dask_gpu_mpi.network import streams, worker_comm
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.streams import CHUNK, FEWER, KEY, LEAST, SOCKETS, TAG, Keys, Stream, StreamError
from dask_gpu_mpi.network.worker_comm import WorkerComm, use_streams_between_workers
from dask_gpu_mpi.workers.plugins import FailedTransfers
from support.mocks.comms import pair, there_and_back

# -- between two workers ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each part that goes over a stream, of workers that encrypt."""
    found: list[int] = []
    send = Stream.send

    def noted(stream: Stream, chunks: Iterator[memoryview]) -> None:
        kept = list(chunks)
        found.append(sum(map(len, kept)))
        send(stream, iter(kept))

    monkeypatch.setattr(Stream, "send", noted)
    for name in ("offers_ucx", "offers_streams", "sealed", "has_gpu"):
        monkeypatch.setattr(WorkerComm, name, False)
    monkeypatch.setattr(worker_comm, "without_ucx", {})
    monkeypatch.setattr(worker_comm, "WORTH", 0, raising=False)
    monkeypatch.setattr(worker_comm, "sockets", lambda sealed: FEWER if sealed else SOCKETS)
    monkeypatch.setattr(worker_comm.Ucx, "_loop", None)
    monkeypatch.setitem(registry.backends, "tls", registry.get_backend("tls"))
    with dask.config.set(make_credentials()):
        use_streams_between_workers(sealed=True, has_gpu=False)
        yield found


async def exchange(first: str) -> None:
    """Arrays that arrive as they were sent, twice; the end that is first to send a large one: the other one ("back"), or this."""
    async with pair() as comm:
        for _ in range(2):
            if first == "back":
                await comm.write({"size": 2 * LEAST})
                back = (await comm.read())["back"]
                assert (back.shape, back.sum()) == ((2 * LEAST,), 7 * 2 * LEAST)
            assert (await there_and_back(comm, np.ones(2 * LEAST, "u1"))).sum() == 2 * LEAST


@pytest.mark.parametrize("sealed", [True, False])
async def test_large_arrays_in_both_directions(sealed: bool, sent: list[int]) -> None:
    use_streams_between_workers(sealed=sealed, has_gpu=False)
    async with pair() as comm:
        for size in (0, LEAST - 1, LEAST, 3 * CHUNK + 5):
            data = np.frombuffer(secrets.token_bytes(size), "u1")
            assert ((await there_and_back(comm, data)) == data).all()
        assert await there_and_back(comm, {"a": 1}) == {"a": 1}
        assert len(comm._endpoint._streams) == (FEWER if sealed else SOCKETS)
    assert sum(sent) == 2 * (LEAST + 3 * CHUNK + 5)


@pytest.mark.parametrize(
    ("version", "sealed", "cores", "count"),
    [
        ("50.0.2", True, SOCKETS, SOCKETS),
        ("50.0.2", True, SOCKETS - 1, FEWER),
        ("49.0", True, SOCKETS, FEWER),
        ("49.0", False, SOCKETS, SOCKETS),
        ("49.0", False, 1, FEWER),
    ],
)
async def test_how_many_sockets(
    version: str, sealed: bool, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cryptography.__version__", version)
    monkeypatch.setattr(worker_comm, "sockets", streams.sockets.__wrapped__)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    use_streams_between_workers(sealed=sealed, has_gpu=False)
    async with pair() as comm:
        await there_and_back(comm, np.ones(2 * LEAST, "u1"))
        assert len(comm._endpoint._streams) == count


async def test_all_frames_of_a_message_go_together(sent: list[int]) -> None:
    """Frames of cuDF have some megabytes: one after the other, each would cost as much as its bytes."""

    async def echo_all(comm: Any) -> None:
        with contextlib.suppress(CommClosedError):
            while True:
                await comm.write([to_serialize(each) for each in await comm.read()])

    async with pair(echo_all) as comm:
        arrays = [
            np.frombuffer(secrets.token_bytes(size), "u1") for size in (LEAST, 3 * CHUNK + 5, 2 * LEAST)
        ]
        await comm.write([to_serialize(each) for each in arrays])
        back = await comm.read()
        assert [(there == here).all() for there, here in zip(back, arrays, strict=True)] == [True] * 3
    assert len(sent) == 2 * FEWER
    assert max(sent) - min(sent) <= FEWER * 4096
    assert sum(sent) == 2 * sum(map(len, arrays))


@pytest.mark.parametrize("kind", ["u1", "f8"])
@pytest.mark.parametrize("rest", [8, LEAST], ids=["a small last piece", "a large one"])
async def test_a_large_array_arrives_in_its_place(rest: int, kind: str) -> None:
    """Dask cuts frames into pieces of 64 MiB, and would copy the array at the other end if each came into memory of its own."""
    data = np.full(((64 << 20) + rest) // np.dtype(kind).itemsize, 7, kind)
    async with pair() as comm:
        await there_and_back(comm, np.ones(2 * LEAST, "u1"))
        tracemalloc.start()
        try:
            assert (await there_and_back(comm, data)).sum() == 7 * data.size
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 2.5 * data.nbytes  # the array at both ends


async def test_the_end_that_was_connected_to_has_the_first_large_frame(sent: list[int]) -> None:
    """It can't make connections, and asks the other end for them."""
    await exchange("back")
    assert sum(sent) == 2 * 3 * 2 * LEAST


@pytest.mark.parametrize(("sealed", "parts"), [(True, 2 * FEWER), (False, 0)])
async def test_other_buffers_only_if_they_are_encrypted(sealed: bool, parts: int, sent: list[int]) -> None:
    """They may determine how a message is deserialised; TLS and sealed streams authenticate each byte."""
    use_streams_between_workers(sealed=sealed, has_gpu=False)
    async with pair() as comm:
        data = bytearray(secrets.token_bytes(2 * LEAST))
        assert await there_and_back(comm, data) == data
    assert len(sent) == parts


async def test_a_process_that_offers_nothing_stays_with_tls(
    sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_comm._Connector, "comm_class", TLS)
    monkeypatch.setattr(TLS, "connection_args", None, raising=False)
    async with pair() as comm:
        assert (await there_and_back(comm, np.ones(2 * LEAST, "u1"))).sum() == 2 * LEAST
    assert sent == []


async def refused(*_: Any, **__: Any) -> Any:
    raise OSError("refused by a firewall")


async def slow(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(60)


def no_descriptor(comm: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("first", ["there", "back"])
@pytest.mark.parametrize(
    ("name", "failing", "says"),
    [
        ("connect", refused, "refused by a firewall"),
        # sixty workers that all connect at once on few cores, for example
        ("connect", slow, "not opened within 0.5 s"),
        # at either end; or an older cryptography
        ("_socket_of", no_descriptor, "Too many open files"),
    ],
)
async def test_streams_that_can_not_be_made(
    first: str, name: str, failing: Any, says: str, sent: list[int],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The connection stays with TLS, and says so once."""
    monkeypatch.setattr(worker_comm, name, failing)
    if failing is slow:
        monkeypatch.setattr(worker_comm, "STREAMS_START", 0.5)
    await exchange(first)
    assert sent == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1 do not go over streams: " in line
    assert says in line


async def test_little_data_do_not_need_streams(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are worth their connections only after some data."""
    monkeypatch.setattr(worker_comm, "WORTH", 3 * LEAST)
    async with pair() as comm:
        for _ in range(2):
            assert (await there_and_back(comm, np.ones(LEAST, "u1"))).sum() == LEAST
        assert sent == []
        assert (await there_and_back(comm, np.ones(LEAST, "u1"))).sum() == LEAST
    assert sum(sent) == 2 * LEAST


async def test_a_peer_that_stops_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed in time, and Dask tries again with another."""
    monkeypatch.setattr(streams, "STALLED", 0.2)
    monkeypatch.setattr(streams, "QUEUED", 0.2)
    monkeypatch.setattr(Stream, "send", lambda stream, chunks: None)
    async with pair() as comm:
        await comm.write({"size": 2 * LEAST})
        with pytest.raises(CommClosedError, match=r"no data for 0\.2 s"):
            await comm.read()
        assert comm.closed()


async def test_the_end_of_the_connection_ends_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()

    async def waiting(stream: Stream, part: Any) -> None:
        waits.set()
        await asyncio.sleep(2)  # the sender's end waits for it

    monkeypatch.setattr(streams.Streams, "_send_part", lambda self, *rest: waiting(*rest))
    async with pair() as comm:
        await comm.write({"size": 2 * LEAST})
        reading = asyncio.ensure_future(comm.read())
        await waits.wait()
        comm.abort()
        with pytest.raises(CommClosedError):
            await asyncio.wait_for(reading, 10)


async def test_a_sender_whose_receiver_is_never_ready() -> None:
    """The end of the connection ends its wait, and the socket is not closed under the event loop."""
    server, comms = asyncio.get_running_loop().create_future(), []

    async def handle(comm: Any) -> None:
        comms.append(comm)
        await comm.read()
        await comm.write({"back": to_serialize(np.ones(2 * LEAST, "u1"))})
        sending = asyncio.ensure_future(comm._endpoint.send(np.ones(2 * LEAST, "u1")))
        await asyncio.sleep(0.1)
        comm.abort()
        server.set_result(await asyncio.gather(sending, return_exceptions=True))

    async with pair(handle) as comm:
        await comm.write({"data": 1})
        await comm.read()
        (error,) = await asyncio.wait_for(server, 10)
    assert isinstance(error, StreamError)


@pytest.mark.parametrize("failures", [1, 1000])
async def test_no_memory_for_what_arrives(
    failures: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on when there is memory again; otherwise the task fails, and the worker goes on."""
    left, allocate = [failures], worker_comm.host_array

    def host_array(size: int) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError("nothing is left")
        return allocate(size)

    monkeypatch.setattr(worker_comm, "host_array", host_array)
    monkeypatch.setattr(WorkerComm, "_without_memory", {})
    host: dict[str, Any] = {"host": "127.0.0.1", "dashboard": False}
    async with (
        Scheduler(protocol="tls", port=0, dashboard_address=":0", **host) as scheduler,
        Worker(scheduler.address, **host) as here,
        Worker(scheduler.address, plugins=[FailedTransfers()], **host) as there,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        data = client.submit(np.ones, LEAST, workers=[here.address])
        await wait(data)
        total = client.submit(np.sum, data, workers=[there.address])
        if failures == 1:
            assert await asyncio.wait_for(total.result(), 30) == LEAST
        else:
            with pytest.raises(
                MemoryError, match=rf"no host memory for {8 * LEAST:,} bytes .*: nothing is left"
            ):
                await asyncio.wait_for(total.result(), 30)
            left[0] = 0
            again = client.submit(np.max, data, workers=[there.address])
            assert await asyncio.wait_for(again.result(), 30) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dask_gpu_mpi: ")]
    assert f"no host memory for {8 * LEAST:,} bytes from the worker at {here.address}" in line


class Strange:
    """An object whose serialiser makes a buffer that is not contiguous, and whose deserialiser takes memoryviews."""

    def __init__(self, data: Any) -> None:
        self.data = data


@dask_serialize.register(Strange)
def _serialize(strange: Strange) -> tuple[dict[str, Any], list[Any]]:
    return {}, [memoryview(strange.data)]


@dask_deserialize.register(Strange)
def _deserialize(header: dict[str, Any], frames: list[Any]) -> Strange:
    return Strange(np.frombuffer(frames[0].cast("B"), "u1"))


async def test_buffers_of_other_serialisers(sent: list[int]) -> None:
    data = np.arange(4 * LEAST, dtype="u1").reshape(2, -1)[:, ::2]
    async with pair() as comm:
        back = await there_and_back(comm, Strange(data))
    assert (back.data == data.ravel()).all()
    assert sum(sent) == 2 * data.nbytes


async def test_streams_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_comm, "STREAMS_START", 2.0)
    came: dict[bytes, list[Stream]] = {}
    monkeypatch.setattr(WorkerComm, "_arrived", came)
    async with pair() as comm:
        reason = await comm._open_streams()
        assert reason == ""
        assert [len(found) for found in came.values()] == [FEWER]
        while came:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("keys", [[b"short", b"short"], [None, None], ["text", 3], None], ids=repr)
async def test_garbage_in_place_of_keys(keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, also if it would be a stream without encryption, and the others are not affected."""
    came: dict[bytes, list[Stream]] = {}
    monkeypatch.setattr(WorkerComm, "_arrived", came)
    async with pair() as comm:
        stranger = await connect(comm.peer_address, **comm.connection_args)
        await stranger.write({"op": worker_comm.STREAM_OPERATION, "name": comm._streams_name, "keys": keys})
        with pytest.raises(CommClosedError):
            await asyncio.wait_for(stranger.read(), 10)
        assert came == {}
        assert (await there_and_back(comm, np.ones(2 * LEAST, "u1"))).sum() == 2 * LEAST


# -- one socket -----------------------------------------------------------------------------------------------------------


Ends = tuple[Stream, socket.socket, Stream]


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    """Make a stream, the wire from it, and the stream at the other end, which reads what is written to its wire."""
    with contextlib.ExitStack() as stack:

        def make(*, sealed: bool = True) -> Ends:
            keys = Keys(secrets.token_bytes(KEY), secrets.token_bytes(KEY)) if sealed else Keys()
            pairs = []
            for _ in range(2):
                with socket.create_server(("127.0.0.1", 0)) as server:
                    one = socket.create_connection(server.getsockname())
                    pairs.append((stack.enter_context(one), stack.enter_context(server.accept()[0])))
            sender, receiver = Stream(pairs[0][0], keys), Stream(pairs[1][0], Keys(keys.received, keys.sent))
            receiver.wire = pairs[1][1]  # type: ignore[attr-defined]
            return sender, pairs[0][1], receiver

        yield make


def read(wire: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += wire.recv(size - len(data))
    return data


DATA = bytes(range(256)) * 40
FORGED = "not those that this peer has sent"


def over_the_wire(sender: Stream, wire: socket.socket, *, sealed: bool = True) -> bytes:
    sender.send(iter([memoryview(DATA)]))
    return read(wire, len(DATA) + TAG * sealed)


def arrived(receiver: Any, data: bytes) -> bytes:
    buffer = bytearray(len(DATA))
    receiver.wire.sendall(data)
    receiver.receive(iter([memoryview(buffer)]))
    return bytes(buffer)


def test_nobody_on_the_way_reads_or_repeats_it(ends: Callable[..., Ends]) -> None:
    sender, wire, receiver = ends()
    first, second = (over_the_wire(sender, wire) for _ in range(2))
    assert first != second
    assert all(DATA[start : start + 16] not in first for start in range(0, len(DATA), 16))
    assert arrived(receiver, first) == DATA
    with pytest.raises(StreamError, match=FORGED):
        arrived(receiver, first)  # replayed
    for data in (first, second):
        _, _, receiver = ends()
        with pytest.raises(StreamError, match=FORGED):
            arrived(receiver, data)  # of another connection


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: second,
        lambda first, second: bytes([first[0] ^ 1]) + first[1:],
        lambda first, second: first[:-1] + bytes([first[-1] ^ 1]),
        lambda first, second: bytes(len(first)),
    ],
    ids=["out of order", "first byte", "tag", "garbage"],
)
def test_what_was_changed_is_not_believed(
    change: Callable[[bytes, bytes], bytes], ends: Callable[..., Ends]
) -> None:
    sender, wire, receiver = ends()
    sent = [over_the_wire(sender, wire) for _ in range(2)]
    with pytest.raises(StreamError, match=FORGED):
        arrived(receiver, change(*sent))
    # nor what this end itself has sent: a direction has its own key
    wire.sendall(sent[0])
    with pytest.raises(StreamError, match=FORGED):
        sender.receive(iter([memoryview(bytearray(len(DATA)))]))


def test_what_is_cut_off(ends: Callable[..., Ends]) -> None:
    sender, wire, receiver = ends()
    data = over_the_wire(sender, wire)
    receiver.wire.sendall(data[:-1])  # type: ignore[attr-defined]
    receiver.wire.close()  # type: ignore[attr-defined]
    with pytest.raises(StreamError, match="the other end has closed it"):
        receiver.receive(iter([memoryview(bytearray(len(DATA)))]))


def test_without_keys_it_is_plain(ends: Callable[..., Ends]) -> None:
    sender, wire, receiver = ends(sealed=False)
    data = over_the_wire(sender, wire, sealed=False)
    assert data == DATA
    assert arrived(receiver, data) == DATA
