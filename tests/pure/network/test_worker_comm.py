"""Connections between workers over real TLS, beside which UCX is a mock: what goes which way, and what a failure leaves.

tests/ucx has UCX itself, tests/gpu GPUs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import dask.config
import numpy as np
import pytest
from distributed.comm import CommClosedError, registry
from distributed.comm.tcp import TLS
from distributed.protocol import deserialize, to_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import Serialized

from dask_gpu_mpi.network import ucx_endpoint, worker_comm
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.ucx_endpoint import UcxError
from dask_gpu_mpi.network.worker_comm import FAMILY, WorkerComm, use_ucx_between_workers
from support.mocks.comms import pair, there_and_back


class DeviceMemory:
    """What looks like memory of a GPU to whoever serialises it."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.nbytes = len(data)
        self.__cuda_array_interface__: dict[str, Any] = {}


class Array:
    """An object that has its data there."""

    def __init__(self, data: bytes) -> None:
        self.memory = DeviceMemory(data)


@cuda_serialize.register(Array)
def _serialize(array: Array) -> tuple[dict[str, Any], list[DeviceMemory]]:
    return {}, [array.memory]


@cuda_deserialize.register(Array)
def _deserialize(header: dict[str, Any], frames: list[DeviceMemory]) -> Array:
    assert isinstance(frames[0], DeviceMemory)
    return Array(bytes(frames[0].data))


class Network:
    """The mock: messages by their tags, and what went wrong."""

    def __init__(self) -> None:
        self.messages: defaultdict[int, asyncio.Queue[bytes]] = defaultdict(asyncio.Queue)
        self.sent: list[Any] = []
        self.aborted = 0
        #: What is done to a message on its way.
        self.change: Callable[[bytes], bytes | None] = lambda data: data
        #: Raised, or None, where UCX starts: one for each end.
        self.starts: list[Exception | None] = []


class Endpoint:
    def __init__(self, network: Network, send_tag: int, receive_tag: int) -> None:
        self.network = network
        self.send_tag, self.receive_tag = send_tag, receive_tag
        self.closed = asyncio.Event()

    async def send(self, *frames: Any) -> None:
        self.network.sent += frames
        for frame in frames:
            data = frame.data if isinstance(frame, DeviceMemory) else memoryview(frame).cast("B")
            changed = self.network.change(bytes(data))
            if changed is not None:
                self.network.messages[self.send_tag].put_nowait(changed)

    async def receive(self, *buffers: Any) -> None:
        for buffer in buffers:
            await self._receive(buffer)

    async def _receive(self, buffer: Any) -> None:
        message = asyncio.ensure_future(self.network.messages[self.receive_tag].get())
        closed = asyncio.ensure_future(self.closed.wait())
        await asyncio.wait({message, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if not message.done():
            message.cancel()
            raise UcxError("closed")
        target = buffer.data if isinstance(buffer, DeviceMemory) else memoryview(buffer).cast("B")
        target[:] = message.result()

    def synchronize(self) -> None:
        pass

    def abort(self) -> None:
        self.network.aborted += 1
        self.closed.set()


class Ucx:
    address = b"here"

    def __init__(self, network: Network) -> None:
        self.network = network

    async def connect(self, address: bytes, *, send_tag: int, receive_tag: int) -> Endpoint:
        assert address == self.address
        return Endpoint(self.network, send_tag, receive_tag)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """UCX, as workers that use it for memory of GPUs have it."""
    network = Network()

    async def start() -> Any:
        if network.starts and (error := network.starts.pop()) is not None:
            raise error
        return Ucx(network)

    monkeypatch.setattr(worker_comm, "device_array", lambda size: DeviceMemory(bytes(size)))
    monkeypatch.setattr(worker_comm.Ucx, "begin", lambda: asyncio.ensure_future(start()))
    for owner, name, value in [
        *((worker_comm.Ucx, name, False) for name in ("loopback", "leads", "warned")),
        (worker_comm, "without_ucx", {}), (WorkerComm, "host_frames", 0), (WorkerComm, "offers_ucx", False),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setitem(registry.backends, "tls", registry.get_backend("tls"))
    with dask.config.set(make_credentials()):
        use_ucx_between_workers(0)
        yield network


async def test_memory_of_gpus_goes_over_ucx_and_nothing_else(network: Network) -> None:
    async with pair() as comm:
        # nothing is sent for an empty column of a cuDF partition, which is memory of a GPU at the other end, too
        for data in (b"x" * 100_000, b""):
            both = await there_and_back(comm, [Array(data), Array(b"y")])
            assert [bytes(array.memory.data) for array in both] == [data, b"y"]
        assert await there_and_back(comm, bytearray(b"z" * 1_000_000)) == b"z" * 1_000_000
        assert await there_and_back(comm, {"a": 1}) == {"a": 1}
    assert [len(frame) for frame in network.sent[:2]] == [64, 64]  # the proofs
    assert [frame.nbytes for frame in network.sent[2:]] == [100_000, 1, 100_000, 1, 1, 1]


async def test_large_arrays_of_host_memory_too_where_the_user_wants_it(network: Network) -> None:
    use_ucx_between_workers(1000)

    async with pair() as comm:
        for size in (0, 999, 1000, 100_000):
            assert (await there_and_back(comm, np.ones(size, "u1"))).sum() == size

        # what pickle and msgpack make, and buffers that may hold such
        assert await there_and_back(comm, {"code": b"x" * 100_000}) == {"code": b"x" * 100_000}
        assert await there_and_back(comm, "y" * 100_000) == "y" * 100_000
        assert await there_and_back(comm, bytearray(100_000)) == bytearray(100_000)
    assert [memoryview(frame).nbytes for frame in network.sent] == [64, 64, 1000, 1000, 100_000, 100_000]


async def test_a_frame_that_never_comes_closes_the_connection(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_comm, "FRAMES_TIMEOUT", 0.2)

    async with pair() as comm:
        assert await there_and_back(comm, 5) == 5
        network.change = lambda data: None
        await comm.write({"data": to_serialize(Array(b"x" * 10))})
        with pytest.raises(CommClosedError):
            await comm.read()


@pytest.mark.parametrize("end", [0, 1])
async def test_where_ucx_does_not_start_at_one_end_the_connection_stays_tls(
    network: Network, end: int, capsys: pytest.CaptureFixture[str]
) -> None:
    network.starts = [None, None]
    network.starts[end] = UcxError("no device")

    async with pair() as comm:
        assert await there_and_back(comm, bytearray(b"z" * 100_000)) == b"z" * 100_000
        assert comm._endpoint is None
    assert network.sent == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1  # once for each host
    assert "127.0.0.1 do not go over UCX" in lines[0]
    assert "no device" in lines[0]


@pytest.mark.parametrize(
    "change", [lambda data: b"\0" * len(data), lambda data: None], ids=["forged", "lost"]
)
async def test_where_the_proof_is_wrong_the_connection_stays_tls(
    network: Network, change: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ucx_endpoint, "UCX_PROOF", 0.2)
    network.change = change

    async with pair() as comm:
        assert await there_and_back(comm, {"a": 1}) == {"a": 1}
        assert comm._endpoint is None
    assert network.aborted == 2
    text = capsys.readouterr().err
    assert "not from this peer" in text or "no answer over UCX" in text


@pytest.mark.parametrize(
    ("leads", "used"), [((True, True), True), ((True, False), False), ((False, False), False)]
)
async def test_between_nodes_ucx_is_used_if_it_leads_from_both(
    network: Network, leads: tuple[bool, bool], used: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Else the connection stays TLS, as the job has said at its start."""
    places = iter(zip(("h1", "h2"), leads, strict=True))
    monkeypatch.setattr(worker_comm, "_place", lambda: next(places))

    async with pair() as comm:
        assert bytes((await there_and_back(comm, Array(b"x"))).memory.data) == b"x"
        assert (comm._endpoint is not None) == used
    assert bool(network.sent) == used
    assert capsys.readouterr().err == ""


async def test_no_agreement_closes_the_connection(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_comm, "UCX_AGREEMENT", 0.2)

    async def silent(comm: Any) -> None:
        await asyncio.sleep(0.5)

    async with pair(silent) as comm:
        with pytest.raises(CommClosedError, match="no agreement within"):
            await comm.write({"data": 1})
        assert comm.closed()


async def test_closing_closes_both(network: Network) -> None:
    async with pair() as comm:
        assert await there_and_back(comm, 5) == 5
        await comm.close()
        assert comm.closed()
        with pytest.raises(CommClosedError):
            await comm.write({"data": 1})
        while network.aborted < 2:  # the other end notices
            await asyncio.sleep(0.01)


async def test_an_end_that_does_not_read_notices_that_the_other_has_closed(network: Network) -> None:
    async with pair(lambda comm: comm.close()) as comm, asyncio.timeout(10):
        while not comm.closed():
            await asyncio.sleep(0.01)


async def test_messages_that_are_not_to_be_deserialised_stay_so(network: Network) -> None:
    async with pair() as comm:
        await comm.write({"data": 5})
        await comm.read()  # agreed
        comm.deserialize = False
        back = await there_and_back(comm, Array(b"abc"))
        assert bytes(deserialize(back.header, back.frames).memory.data) == b"abc"


async def test_an_error_while_a_message_is_read_closes_the_connection(network: Network) -> None:
    async def serve(comm: Any) -> None:
        await comm.read()
        await TLS.write(comm, Serialized({"serializer": FAMILY, "large": [], "no": "frames"}, []))
        await asyncio.sleep(0.2)

    async with pair(serve) as comm:
        await comm.write({"data": 1})
        with pytest.raises(KeyError):
            await comm.read()
        assert comm.closed()
