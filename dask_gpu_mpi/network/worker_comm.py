"""Connections between workers: TLS and, if both ends offer it, another way for large frames: UCX, or `streams`.

A worker listens and connects with Dask's TLS, as every process of the cluster, and makes its offers in Dask's handshake.

- UCX: the two agree on an endpoint over the encrypted connection: addresses, secret tags, and a proof of 64 bytes that each sends
  over UCX. From then on frames in GPU memory (with ``protocol="ucx"``: large frames) are sent over UCX.
- Streams, where UCX does not lead: before the first large frame the end that has made the connection makes some more with TLS, to
  the same port, and sends keys over them. Then both ends go on with their sockets alone, without TLS.

All other frames, including headers, are sent over TLS. So

- a peer without a certificate of the job gets no further than TLS, and only the two ends know tags and keys;
- scheduler, nannies and clients, which offer nothing, need neither, and their messages are always encrypted;
- a connection whose UCX or streams do not work stays on TLS;
- the end of the TLS connection ends them: a process that has died is detected at once, as with TCP.

Sources: `distributed.comm.tcp`; `distributed_ucxx.ucxx` (0.46 to 0.52) for the order of calls to CUDA; ucxx's worker addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from distributed.comm import registry
from distributed.comm.core import CommClosedError, connect
from distributed.comm.tcp import TLS, TLSBackend, TLSConnector
from distributed.comm.utils import OFFLOAD_THRESHOLD, from_frames, to_frames
from distributed.protocol.serialize import Serialize, Serialized, register_serialization_family
from distributed.protocol.utils import host_array, merge_memoryviews
from distributed.utils import ensure_memoryview, nbytes

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeouts import STREAMS_START, UCX_AGREEMENT, UCX_START
from dask_gpu_mpi.network.interfaces import boot_id
from dask_gpu_mpi.network.listeners import TLSListener
from dask_gpu_mpi.network.streams import (
    KEY,
    LEAST,
    WORTH,
    Keys,
    Stream,
    StreamError,
    Streams,
    device_array,
    on_device,
    sockets,
)
from dask_gpu_mpi.network.ucx_endpoint import Endpoint, Ucx, UcxError, proven_endpoint

#: Key of Dask's handshake. Its value has this version, the node of the process, and whether UCX leads from there to others.
OFFER, VERSION = "dask-gpu-mpi-ucx", 3
#: The same for streams: this version, random bytes, whether they have to be encrypted, whether the process has a GPU, and the
#: number of sockets that it wants.
STREAMS_OFFER, STREAMS_VERSION = "dask-gpu-mpi-streams", 3
#: The operation by which a connection becomes a stream of another one, and the serialiser of `WorkerComm`'s own messages.
STREAM_OPERATION = FAMILY = "dask-gpu-mpi-stream"
#: Seconds for a message's large frames, plus one for each of so many bytes; then the connection is closed, and Dask tries again.
FRAMES_TIMEOUT, SLOWEST = 300.0, 10e6
#: Transfers from a peer, one after the other, for which there is no memory, before tasks fail.
MOST_WITHOUT_MEMORY = 3
#: distributed's serialisers that leave memory on the GPU.
SERIALIZERS = ("cuda", "dask", "pickle", "error")
#: Values that are never large, and groups of values. `isinstance` tests tuples faster than unions, which are made at each call.
_PLAIN = (int, float, str, bytes, type(None))
_GROUPS = (list, tuple, set, frozenset)
_boot_id = functools.cache(boot_id)
#: Addresses with which a connection has stayed on TLS, with the reason; each is warned of once.
without_ucx: dict[str, str] = {}


def use_ucx_between_workers(
    host_frames: int, *, loopback: bool = False, leads: bool = False, warned: bool = False, devices: str = ""
) -> None:
    """Offer UCX in the TLS connections of this process, in which a worker is made afterwards.

    `host_frames` is the least size of arrays in host memory that are sent over UCX as well; 0: none. For the others see `Ucx`.
    """
    WorkerComm.offers_ucx = True
    WorkerComm.host_frames = host_frames
    Ucx.loopback, Ucx.leads, Ucx.warned, Ucx.devices = loopback, leads, warned, devices
    registry.backends["tls"] = _Backend()


def use_streams_between_workers(*, sealed: bool, has_gpu: bool) -> None:
    """Offer streams in the TLS connections of this process, in which a worker is made afterwards.

    `sealed`: encrypted. `has_gpu`: the worker sends and receives memory of a GPU.
    """
    WorkerComm.offers_streams = True
    WorkerComm.sealed, WorkerComm.has_gpu = sealed, has_gpu
    registry.backends["tls"] = _Backend()


class _Announced:
    """A message of `FAMILY`: its header, and the frames that came with it over TLS."""

    def __init__(self, header: dict[str, Any], frames: Sequence[Any]) -> None:
        self.header = header
        self.frames = frames


_OF_FAMILY = (_Announced, Serialized)
register_serialization_family(FAMILY, None, _Announced)


class WorkerComm(TLS):
    """One end of such a connection.

    Over TLS go the messages of the caller, and those of these connections themselves (`FAMILY`): one that divides the frames of a
    message, whose large ones follow by the endpoint; ``open`` asks the other end to open streams, and ``opened`` answers that.
    """

    #: See `use_ucx_between_workers`, `use_streams_between_workers`.
    offers_ucx = offers_streams = sealed = has_gpu = False
    host_frames = 0
    #: The arguments with which this end has made the connection; None: the other end has.
    connection_args: dict[str, Any] | None = None
    #: Streams that have come to this process, and whose connection has not used them yet, by its `_streams_name`.
    _arrived: dict[bytes, list[Stream]] = {}  # noqa: RUF012
    #: Transfers one after the other for which there was no memory, by the address of the peer.
    _without_memory: dict[str, int] = {}  # noqa: RUF012
    _tls_has_ended = False

    def __init__(self, stream: Any, local_addr: str, peer_addr: str, deserialize: bool = True) -> None:
        super().__init__(stream, local_addr, peer_addr, deserialize)
        #: The other way for large frames: UCX, streams, or None: none yet.
        self._endpoint: Endpoint | Streams | None = None
        #: Whether both ends have offered UCX and have not agreed yet; and the task in which this end agrees.
        self._has_to_agree = False
        self._agreeing: asyncio.Task[None] | None = None
        #: The name of this connection for its streams, which only the two ends know; empty: it can have none.
        self._streams_name = b""
        #: How many streams it gets, whether they are encrypted, and whether both ends have a GPU.
        self._stream_count = 0
        self._seals = self._has_gpus = False
        #: Bytes of the large frames that this end has sent before there were streams.
        self._large_bytes = 0
        stream.set_close_callback(functools.partial(_on_close, weakref.ref(self)))

    # -- the offers ---------------------------------------------------------------------------------------------

    def handshake_info(self) -> dict[str, Any]:
        """The offers of this end in Dask's handshake: they belong to one event loop, the worker's."""
        offers: dict[str, Any] = {}
        is_of_worker = Ucx.is_of_this_loop()
        if is_of_worker and self.offers_ucx:
            offers[OFFER] = [VERSION, *_place()]
        if is_of_worker and self.offers_streams:
            count = sockets(sealed=self.sealed)
            name = secrets.token_bytes(16)
            offers[STREAMS_OFFER] = [STREAMS_VERSION, name, self.sealed, self.has_gpu, count]
        return {**super().handshake_info(), **offers}

    def handshake_configuration(self, local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Called by distributed, at either end, with both offers. An offer of another version counts as none."""
        match local.get(OFFER), remote.get(OFFER):
            case [version, here, leads_there], [other_version, there, leads_here] if version == other_version:
                self._has_to_agree = here == there or bool(leads_there and leads_here)
        own, other = local.get(STREAMS_OFFER), remote.get(STREAMS_OFFER)
        match other:
            case [version, name, seals, has_gpu, int(count)] if own and version == own[0]:
                self._streams_name = b"".join(sorted((own[1], name)))
                self._seals, self._has_gpus = bool(own[2] or seals), bool(own[3] and has_gpu)
                self._stream_count = max(1, min(own[4], count))
        configuration: dict[str, Any] = super().handshake_configuration(local, remote)
        return configuration

    # -- messages -----------------------------------------------------------------------------------------------

    async def read(self, deserializers: Any = None) -> Any:
        """Receive a message, and do what the other end needs for its streams before."""
        if self._has_to_agree:
            await self._agree_once()
        known = deserializers if deserializers is None else [*deserializers, FAMILY]
        while True:
            message = await super().read(known)
            if isinstance(message, _OF_FAMILY) and message.header.get("serializer") == FAMILY:
                if "open" not in message.header:
                    return await self._read_divided(message, deserializers)
                # the other end has a large frame, and can't make connections
                if reason := await self._open_streams():
                    self._streams_name = b""
                await super().write(Serialized({"serializer": FAMILY, "opened": reason}, []))
            elif self._streams_name and isinstance(message, dict) and message.get("op") == STREAM_OPERATION:
                await self._become_stream(message)
            else:
                return message

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Send a message; returns its bytes. Its large frames go another way, which is made for the first of them."""
        if self._has_to_agree:
            await self._agree_once()
        has_other_way = bool(self._endpoint or self._streams_name)
        if not (has_other_way and _may_be_large(msg, 0 if self._uses_ucx else LEAST)):
            size: int = await super().write(msg, serializers=serializers, on_error=on_error)
            return size
        frames = await to_frames(
            msg,
            serializers=self._serializers if serializers is None else serializers,
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
        )
        buffers = _buffers_of(frames)
        is_large = [any(map(self._is_large, pieces)) for pieces in buffers]
        large = list(itertools.compress(buffers, is_large))
        if large and self._endpoint is None:
            self._large_bytes += sum(map(nbytes, itertools.chain(*large)))
            if self._large_bytes < WORTH or not await self._has_streams():
                return await super().write(msg, serializers=serializers, on_error=on_error)  # type: ignore[no-any-return]
        await self._write_divided(buffers, is_large)
        return sum(map(nbytes, frames))

    async def _write_divided(self, buffers: Sequence[Sequence[Any]], is_large: Sequence[bool]) -> None:
        """Send the header and the small buffers over TLS, then the large ones by the endpoint."""
        large = [each for pieces in itertools.compress(buffers, is_large) for each in _joined(pieces)]
        over_tls = [
            piece for pieces, flag in zip(buffers, is_large, strict=True) if not flag for piece in pieces
        ]
        header = {
            "serializer": FAMILY,
            # of each frame
            "is_large": bytes(flag for pieces, flag in zip(buffers, is_large, strict=True) for _ in pieces),
            "large": [(sizes, on_device(frame)) for frame, sizes in large],
        }
        endpoint = self._endpoint
        if endpoint is not None and any(on_device(frame) for frame, _ in large):
            endpoint.synchronize()  # the frames are complete
        await super().write(Serialized(header, over_tls))
        with self._aborting_on_error():
            if sent := [frame for frame, sizes in large if sum(sizes)]:
                assert endpoint is not None  # nothing is large without one
                async with _time_for(sent):
                    await endpoint.send(*sent)

    async def _read_divided(self, message: Any, deserializers: Any) -> Any:
        """Receive the large buffers of this message by the endpoint, and return what the message and these hold together."""
        header = message.header
        if header["large"] and self._endpoint is None:
            self._use_those_that_arrived()
        endpoint = self._endpoint
        with self._aborting_on_error():
            large = [self._memory_for(sum(sizes), on_gpu) for sizes, on_gpu in header["large"]]
            self._without_memory.pop(self.peer_address, None)
            if endpoint is not None and any(on_gpu for _, on_gpu in header["large"]):
                endpoint.synchronize()  # the arrays are there
            if received := [*filter(nbytes, large)]:
                assert endpoint is not None  # as above
                async with _time_for(received):
                    await endpoint.receive(*received)
            pieces = (_pieces(frame, sizes) for frame, (sizes, _) in zip(large, header["large"], strict=True))
            others, over_tls = itertools.chain.from_iterable(pieces), iter(message.frames)
            frames = [next(others if is_large else over_tls) for is_large in header["is_large"]]
            # GPU memory is not copied, so a thread for it would only cost its start.
            on_host = sum(nbytes(frame) for frame in frames if not on_device(frame))
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=self._serializers if deserializers is None else deserializers,
                allow_offload=bool(OFFLOAD_THRESHOLD) and on_host > OFFLOAD_THRESHOLD,
            )

    def _memory_for(self, size: int, on_gpu: bool) -> Any:
        """Allocate a frame; if there is no memory, Dask tries again, and the third time the tasks that need the data fail."""
        try:
            # not the memoryview itself: see `Endpoint`
            return device_array(size) if on_gpu else host_array(size).obj
        except MemoryError as error:
            memory, fix = ("GPU", "a larger rmm_pool_size, ") if on_gpu else ("host", "")
            found = (
                f"{socket.gethostname()}: no {memory} memory for {size:,} bytes from the worker at {self.peer_address}: {error}. "
                f"Fix: smaller chunks or partitions, {fix}or fewer workers on each node"
            )
            times = self._without_memory[self.peer_address] = (
                self._without_memory.get(self.peer_address, 0) + 1
            )
            if times == MOST_WITHOUT_MEMORY:
                del self._without_memory[self.peer_address]
                raise MemoryError(found) from None
            if times == 1:
                say(f"warning: {found}")
            raise CommClosedError(found) from None

    @property
    def _serializers(self) -> Sequence[str] | None:
        """What leaves memory on the GPU, if it can go from GPU to GPU; None: distributed's."""
        return SERIALIZERS if self._uses_ucx or self._has_gpus else None

    @property
    def _uses_ucx(self) -> bool:
        return self._endpoint is not None and not isinstance(self._endpoint, Streams)

    def _is_large(self, frame: Any) -> bool:
        """Whether a frame goes another way than TLS."""
        if on_device(frame):
            return True  # even an empty one, of which only the header is sent: it is GPU memory at the other end, too
        buffer = frame.obj if isinstance(frame, memoryview) else frame
        # Without encryption TLS alone authenticates data, and other buffers may determine how a message is deserialised.
        is_array = type(buffer).__module__ == "numpy"
        if self._uses_ucx:
            return is_array and 0 < self.host_frames <= nbytes(frame)
        return nbytes(frame) >= LEAST and (is_array or self._seals)

    # -- streams ------------------------------------------------------------------------------------------------

    async def _has_streams(self) -> bool:
        """Open the streams, by this end or the other; returns whether that has worked."""
        if self.connection_args is not None:
            reason = await self._open_streams()
        else:
            with self._aborting_on_error():
                # longer than the other end tries
                async with asyncio.timeout(2 * STREAMS_START):
                    await super().write(Serialized({"serializer": FAMILY, "open": True}, []))
                    answer = await super().read()
                if not (isinstance(answer, _OF_FAMILY) and "opened" in answer.header):
                    raise StreamError("another message in place of the streams")
                reason = answer.header["opened"]
            if not reason:
                self._use_those_that_arrived()
        if reason:
            self._streams_name = b""
            fix = "find out why these nodes refuse further connections, or are too busy for them"
            _warn_once(self.peer_address, reason, "streams", fix)
        return not reason

    async def _open_streams(self) -> str:
        """Make the streams, at the end that has made the connection; returns why that has failed."""
        assert self.connection_args is not None  # the other end asks only then
        if not self._streams_name:
            return "they could not be made before"
        streams: list[Stream] = []
        comm: Any = None
        try:
            async with asyncio.timeout(STREAMS_START):
                for _ in range(self._stream_count):
                    comm = await connect(self.peer_address, **self.connection_args)
                    keys = [secrets.token_bytes(KEY) if self._seals else None for _ in range(2)]
                    await comm.write({"op": STREAM_OPERATION, "name": self._streams_name, "keys": keys})
                    if (answer := await comm.read()) != "OK":
                        raise OSError(answer)
                    streams.append(Stream(_socket_of(comm), Keys(*keys)))
                    comm.abort()
        except BaseException as error:
            if comm is not None:
                comm.abort()
            for stream in streams:
                stream.socket.close()
            if not isinstance(error, (OSError, TimeoutError)):
                raise
            return str(error) or f"not opened within {STREAMS_START:g} s"
        self._use(Streams(streams))
        return ""

    async def _become_stream(self, message: dict[str, Any]) -> None:
        """At the other end: this connection is a stream of another one from now on. Raises a CommClosedError, for distributed."""
        match message:
            case {"name": bytes(name), "keys": [received, sent]} if all(map(self._is_key, (received, sent))):
                pass
            case _:
                self.abort()
                raise CommClosedError("a stream without its keys")
        try:
            stream = Stream(_socket_of(self), Keys(sent, received))
        except OSError as error:  # no descriptor is left, for example: the other end stays with TLS
            await super().write(f"at the other end: {error}")
            return
        # Sent at once, in this turn of the event loop: the other end uses the socket without TLS after it.
        await super().write("OK")
        if self.stream is None or self.stream.writing():
            stream.socket.close()
            raise CommClosedError("the connection is too slow for a stream")
        self.abort()
        self._arrived.setdefault(name, []).append(stream)
        asyncio.get_running_loop().call_later(2 * STREAMS_START, _drop, self._arrived, name)
        raise CommClosedError("became a stream")

    def _is_key(self, key: Any) -> bool:
        return isinstance(key, bytes) and len(key) == KEY if self._seals else key is None

    def _use_those_that_arrived(self) -> None:
        streams = self._arrived.pop(self._streams_name, [])
        if len(streams) != self._stream_count:
            self.abort()
            raise CommClosedError(f"in {self}: {len(streams)} streams")
        self._use(Streams(streams))

    # -- UCX ----------------------------------------------------------------------------------------------------

    async def _agree_once(self) -> None:
        """Agree once, before the first message in either direction."""
        if self._agreeing is None:
            self._agreeing = asyncio.get_running_loop().create_task(self._agree())
        await asyncio.shield(self._agreeing)

    async def _agree(self) -> None:
        """Agree with the other end, which does the same, on an endpoint or on none."""
        with self._aborting_on_error():
            try:
                async with asyncio.timeout(UCX_AGREEMENT):
                    endpoint, reason = await self._make_endpoint()
            except TimeoutError:
                raise CommClosedError(f"in {self}: no agreement within {UCX_AGREEMENT:g} s") from None
        if endpoint is None:
            fix = "run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"
            _warn_once(self.peer_address, reason, "UCX", fix)
        else:
            self._use(endpoint)
        self._has_to_agree = False

    async def _make_endpoint(self) -> tuple[Endpoint | None, str]:
        """The endpoint, or the reason why there is none."""
        # what the other end needs of this one: see `proven_endpoint`
        own: dict[str, Any] = {"tag": secrets.randbits(64), "key": secrets.token_bytes(32), "address": b""}
        ucx: Ucx | None = None
        try:
            async with asyncio.timeout(UCX_START):
                ucx = await asyncio.shield(Ucx.begin())
            own["address"] = ucx.address
        except UcxError as error:
            own["reason"] = str(error)
        except TimeoutError:
            own["reason"] = f"UCX has not started within {UCX_START:g} s"
        await super().write(own)
        other = await super().read()
        if ucx is None or not other["address"]:
            return None, own.get("reason") or f"at the other end: {other.get('reason')}"
        endpoint, reason = await proven_endpoint(ucx, own, other)
        try:
            await super().write({"reason": reason})
            others_reason = (await super().read())["reason"]
            reason = reason or others_reason
        except BaseException:
            reason = "the connection was closed"
            raise
        finally:
            if reason and endpoint is not None:
                endpoint.abort()
        return (None, reason) if reason else (endpoint, "")

    # -- both -----------------------------------------------------------------------------------------------------

    def _use(self, endpoint: Endpoint | Streams) -> None:
        self._endpoint = endpoint
        # Dask drops connections that the other end has closed, but does not close them.
        weakref.finalize(self, _abort_soon, asyncio.get_running_loop(), endpoint).atexit = False
        if self.closed():  # meanwhile
            self._abort_endpoint()

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Close the connection if a message has not been transferred as a whole, since its state is unknown then."""
        try:
            yield
        except (UcxError, StreamError, EOFError, TimeoutError) as error:
            self.abort()
            raise CommClosedError(f"in {self}: {error}") from error
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close both at once."""
        self._abort_endpoint()
        super().abort()

    async def close(self) -> None:  # type: ignore[override]
        """Close both, TLS after its pending data."""
        await super().close()
        self._abort_endpoint()

    def closed(self) -> bool:
        """Whether it has ended."""
        return self._tls_has_ended or bool(super().closed())

    def _abort_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort()


def _place() -> tuple[str, bool]:
    """The node of this process, and whether UCX may lead from it to others."""
    return f"{socket.gethostname()} {_boot_id()}", Ucx.leads


def _time_for(frames: Sequence[Any]) -> asyncio.Timeout:
    return asyncio.timeout(FRAMES_TIMEOUT + sum(map(nbytes, frames)) / SLOWEST)


def _abort_soon(loop: asyncio.AbstractEventLoop, endpoint: Endpoint | Streams) -> None:
    """Abort in the event loop: Python collects garbage in any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(endpoint.abort)


def _on_close(reference: weakref.ref[WorkerComm]) -> None:
    """The TLS connection has ended, at either end."""
    if (comm := reference()) is not None:
        comm._tls_has_ended = True
        comm._abort_endpoint()


def _may_be_large(message: Any, least: int) -> bool:
    """Whether a message may have frames of `least` bytes: most between workers have none, and go as distributed sends them."""
    if isinstance(message, _PLAIN):
        return False
    if isinstance(message, dict):
        message = message.values()
    elif isinstance(message, Serialize):
        size = getattr(message.data, "nbytes", None)
        if isinstance(message.data, _PLAIN):
            size = sys.getsizeof(message.data)
        return not isinstance(size, int) or size >= least
    elif not isinstance(message, _GROUPS):
        return True
    for value in message:  # noqa: SIM110  # half the time of `any`, for every message between workers
        if not isinstance(value, _PLAIN) and _may_be_large(value, least):
            return True
    return False


def _buffers_of(frames: Iterable[Any]) -> list[list[Any]]:
    """The frames, with those together that are pieces of one buffer: Dask cuts buffers of more than 64 MiB."""
    buffers: list[list[Any]] = []
    for frame in frames:
        before = buffers[-1][-1] if buffers else None
        if isinstance(before, memoryview) and isinstance(frame, memoryview) and before.obj is frame.obj:
            buffers[-1].append(frame)
        else:
            buffers.append([frame])
    return buffers


def _joined(pieces: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """A buffer as it is sent, whole if that is possible, and the sizes of its pieces.

    Each part is contiguous, whatever a serialiser of the user's has made.
    """
    try:
        whole = merge_memoryviews(pieces) if len(pieces) > 1 else pieces[0]
    except (ValueError, TypeError):  # they don't follow one another, or are not contiguous
        return [(ensure_memoryview(piece), [nbytes(piece)]) for piece in pieces]
    return [(whole if on_device(whole) else ensure_memoryview(whole), [nbytes(piece) for piece in pieces])]


def _pieces(frame: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """A frame that has come, in the pieces that deserialisers expect, as TLS gives them."""
    if on_device(frame):
        yield frame
        return
    view = memoryview(frame)
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield view[end - size : end]


def _drop(came: dict[bytes, list[Stream]], name: bytes) -> None:
    """Close streams whose connection has not used them."""
    for stream in came.pop(name, []):
        stream.socket.close()


def _socket_of(comm: TLS) -> socket.socket:
    """The socket of a connection, which stays open when Dask closes the connection."""
    stream: Any = comm.stream
    return socket.socket(fileno=os.dup(stream.socket.fileno()))


def _warn_once(peer: str, reason: str, way: str, fix: str) -> None:
    host = peer.rpartition(":")[0].partition("://")[2]
    if host not in without_ucx:
        without_ucx[host] = reason
        say(
            f"warning: {socket.gethostname()}: transfers between it and {host} do not go over {way}: "
            f"{reason}. Fix: {fix}"
        )


class _Connector(TLSConnector):
    comm_class = WorkerComm

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        comm = await super().connect(address, deserialize, **connection_args)
        comm.connection_args = connection_args
        return comm


class _Listener(TLSListener):
    comm_class = WorkerComm


class _Backend(TLSBackend):
    def get_connector(self) -> _Connector:
        return _Connector()

    def get_listener(self, *args: Any, **kwargs: Any) -> _Listener:
        return _Listener(*args, **kwargs)
