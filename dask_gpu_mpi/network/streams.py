"""Sockets for large frames between two workers, beside their TLS connection: threads, and AES-GCM with a key for each direction.

Dask reads TLS in its event loop, in records of 16 KB. Here threads send and receive, without another copy. `worker_comm` makes
the sockets of a connection (each a `Stream`), and passes the large frames of a message to all of them together (`Streams`):

- The frames are cut into as many parts as there are sockets (`parts_of`). A part is sent in chunks (`chunks`).
- The receiver announces by one byte that a thread is ready for the part. A sender whose thread waited for a receiver that waits
  for a thread might wait forever.
- Each chunk is sealed. Without encryption the same sockets carry plain data.
- Memory of GPUs goes through pinned buffers, whose copies overlap with the network (`_Pinned`).

The sockets begin as connections of Dask with TLS, by which both ends know each other and exchange the keys. So no other port is
open. Lengths are announced over TLS: nothing is allocated for a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from distributed.utils import nbytes

#: Bytes of the smallest frame that is worth a socket of its own, and of a chunk.
LEAST, CHUNK = 1 << 20, 1 << 20
#: Bytes of large frames for which a connection gets streams. A stream costs a handshake of TLS at both ends: 64 workers that each
#: fetch a little from all others would make 12,000.
WORTH = 16 << 20
#: Sockets to a peer. Each costs a handshake, so there are fewer if more of them gain nothing: on fewer cores, and with encryption
#: by a cryptography before this version, whose AES-GCM keeps Python's lock.
SOCKETS, FEWER, RELEASES_LOCK = 4, 2, 50
#: Parts that a process sends, and that it receives, at the same time; each has a thread. A peer that stops in the middle keeps
#: those of its sockets for `QUEUED` or `STALLED`.
AT_ONCE = 16
#: Seconds without a byte after which the other end is taken for dead, and for the first byte of a part: the other end may send
#: other parts before it.
STALLED, QUEUED = 60.0, 300.0
#: Bytes of a key, and of a chunk's tag.
KEY, TAG = 16, 16
#: The byte of a receiver that is ready for a part.
_READY = b"r"


class StreamError(Exception):
    """A part has not been transferred as a whole, or is not what the other end has sent."""


@dataclass(frozen=True)
class Keys:
    """The keys of one socket, as its end that has made the connection uses them; None: no encryption."""

    sent: bytes | None = None
    received: bytes | None = None


class Stream:
    """One end of one socket. Its parts go one after the other; `send` and `receive` run in a thread."""

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if keys.sent is not None and not hasattr(AESGCM, "encrypt_into"):
            sock.close()
            raise OSError("cryptography is older than 47 (expected 47 or newer)")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._seal = None if keys.sent is None else AESGCM(keys.sent)
        self._open = None if keys.received is None else AESGCM(keys.received)
        #: Chunks sealed, and opened; a number is a nonce, and is never used again.
        self._sealed = self._opened = 0

    def announce(self) -> None:
        """Tell the other end that a thread of this end is ready for a part."""
        self._send(memoryview(_READY))

    def send(self, chunks: Iterator[memoryview]) -> None:
        """Send these chunks, sealed if there is a key."""
        for chunk in chunks:
            if self._seal is None:
                self._send(chunk)
                continue
            sealed = memoryview(_buffers.sealed)[: len(chunk) + TAG]
            self._seal.encrypt_into(_nonce(self._sealed), chunk, None, sealed)
            self._sealed += 1
            self._send(sealed)

    def receive(self, chunks: Iterator[memoryview]) -> None:
        """Fill these chunks."""
        from cryptography.exceptions import InvalidTag

        self._wait(select.POLLIN, max(QUEUED, STALLED))
        for chunk in chunks:
            if self._open is None:
                self._receive(chunk)
                continue
            sealed = memoryview(_buffers.sealed)[: len(chunk) + TAG]
            self._receive(sealed)
            try:
                self._open.decrypt_into(_nonce(self._opened), sealed, None, chunk)
            except InvalidTag:
                raise StreamError("the data are not those that this peer has sent") from None
            self._opened += 1

    def _send(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _receive(self, data: memoryview) -> None:
        while data:
            try:
                size = self.socket.recv_into(data)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            if not size:
                raise StreamError("the other end has closed it")
            data = data[size:]

    def _wait(self, event: int, seconds: float | None = None) -> None:
        limit = STALLED if seconds is None else seconds
        poll = select.poll()
        poll.register(self.socket, event)
        if not poll.poll(limit * 1000):
            raise StreamError(f"no data for {limit:g} s")


class Streams:
    """One end of the sockets to a peer, in the worker's event loop; its methods are those of `ucx_endpoint.Endpoint`."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._closed = False
        #: How many tasks and threads may use the sockets now.
        self._users = 0

    async def send(self, *frames: Any) -> None:
        """Send frames that the other end expects."""
        await self._all(frames, self._send_part)

    async def receive(self, *frames: Any) -> None:
        """Fill frames of the sizes of those that are sent."""
        await self._all(frames, self._receive_part)

    async def _all(self, frames: Sequence[Any], transfer: Callable[[Stream, list[Piece]], Any]) -> None:
        if self._closed:
            raise StreamError("the streams were closed")
        tasks = [
            asyncio.ensure_future(transfer(stream, part))
            for stream, part in zip(self._streams, parts_of(frames, len(self._streams)), strict=False)
        ]
        self._users += len(tasks)
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await asyncio.gather(*tasks)
        except BaseException as error:
            self.abort()  # so that the threads end
            await asyncio.wait(tasks)
            if isinstance(error, OSError):
                raise StreamError(error.strerror or str(error)) from None
            raise

    async def _send_part(self, stream: Stream, part: list[Piece]) -> None:
        if not await asyncio.get_running_loop().sock_recv(stream.socket, len(_READY)):
            raise StreamError("the other end has closed it")
        await self._in_thread("sends", lambda: stream.send(chunks(part, sends=True)))

    async def _receive_part(self, stream: Stream, part: list[Piece]) -> None:
        def receive() -> None:
            stream.announce()
            stream.receive(chunks(part, sends=False))

        await self._in_thread("receives", receive)

    def _in_thread(self, pool: str, function: Callable[[], None]) -> asyncio.Future[None]:
        """Call it in a thread of this pool, which may continue for a moment after a cancellation."""
        loop = asyncio.get_running_loop()
        self._users += 1

        def done(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_end, None)

        future = _threads(pool).submit(function)
        future.add_done_callback(done)
        return asyncio.wrap_future(future)

    def _on_end(self, _: object) -> None:
        self._users -= 1
        if self._closed:
            self._close_sockets()

    def synchronize(self) -> None:
        """Nothing: the threads wait for the default stream themselves."""

    def abort(self) -> None:
        """Close them, so that `send` and `receive` raise. May be called again."""
        if not self._closed:
            self._closed = True
            for stream in self._streams:
                with contextlib.suppress(OSError):
                    # wakes the threads, and the event loop's waits
                    stream.socket.shutdown(socket.SHUT_RDWR)
            self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the sockets, unless a task or thread still uses them: another socket could get the same number."""
        if not self._users:
            for stream in self._streams:
                stream.socket.close()


@functools.cache
def sockets(*, sealed: bool) -> int:
    """How many sockets to a peer this process has use for."""
    import cryptography

    releases_lock = int(cryptography.__version__.partition(".")[0]) >= RELEASES_LOCK
    has_use = len(os.sched_getaffinity(0)) >= SOCKETS and (releases_lock or not sealed)
    return SOCKETS if has_use else FEWER


@functools.cache
def _threads(pool: str) -> ThreadPoolExecutor:
    """The threads of this process for parts that it ``"sends"``, or for those that it ``"receives"``."""
    return ThreadPoolExecutor(AT_ONCE, f"dask_gpu_mpi {pool}")


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


class _Buffers(threading.local):
    """The buffers of each of these threads, which it allocates at the first use."""

    def __init__(self) -> None:
        self.sealed = bytearray(CHUNK + TAG)

    @functools.cached_property
    def of_device(self) -> _Pinned:
        """For memory of a GPU."""
        return _Pinned()


_buffers = _Buffers()


# -- the chunks of frames -----------------------------------------------------------------------------------------------

#: A frame, and from which of its bytes to which.
Piece = tuple[Any, int, int]


def parts_of(frames: Sequence[Any], count: int) -> list[list[Piece]]:
    """Cut frames, in their order, into at most so many parts of about the same size.

    >>> parts_of([b"abc", b"defgh"], 1)
    [[(b'abc', 0, 3), (b'defgh', 0, 5)]]
    """
    sizes = [int(nbytes(frame)) for frame in frames]  # type: ignore[no-untyped-call]
    step = -(-sum(sizes) // count // 4096) * 4096
    parts: list[list[Piece]] = []
    left = 0
    for frame, size in zip(frames, sizes, strict=True):
        start = 0
        while start < size:
            if not left:
                parts.append([])
                left = step
            end = min(start + left, size)
            parts[-1].append((frame, start, end))
            left -= end - start
            start = end
    return parts


def on_device(frame: Any) -> bool:
    """Whether a frame is in the memory of a GPU."""
    return hasattr(frame, "__cuda_array_interface__")


def device_array(size: int) -> Any:
    """Allocate bytes on this process's GPU."""
    import rmm

    return rmm.DeviceBuffer(size=size)


def chunks(part: Sequence[Piece], *, sends: bool) -> Iterator[memoryview]:
    """The bytes of a part in chunks, which the caller sends, or fills with what it receives, one after the other.

    Each chunk is valid until the next.
    """
    pointers = {id(frame): _pointer(frame) for frame, _, _ in part if on_device(frame)}
    if pointers:  # before the first byte, for which the other end waits for longer than for others
        _buffers.of_device.wait_for(pointers.values())
    for frame, start, end in part:
        if on_device(frame):
            pinned = _buffers.of_device
            chunks_of_device = pinned.chunks_to_send if sends else pinned.chunks_to_fill
            yield from chunks_of_device(pointers[id(frame)], start, end)
            continue
        data = memoryview(frame).cast("B")
        for place in range(start, end, CHUNK):
            yield data[place : min(place + CHUNK, end)]


def _pointer(frame: Any) -> int:
    return int(frame.__cuda_array_interface__["data"][0])


class _Pinned:
    """Pinned buffers of one thread, and a stream for their copies, by the driver, whose calls release Python's lock.

    The stream follows the default stream of the frame's device at its begin, as UCX between Dask's workers does.
    """

    #: Buffers, of which the network uses one while the others are copied.
    COUNT = 3

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device: int | None = None
        self._buffers: list[memoryview] = []

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise StreamError(f"{name} failed with code {code}")

    def wait_for(self, pointers: Iterable[int]) -> None:
        """Wait until this memory is complete, once for each device: its default stream may have long work, and gets more."""
        waited: set[int | None] = set()
        for pointer in pointers:
            self._use(pointer)
            if self._device not in waited:
                waited.add(self._device)
                self._call("cuStreamSynchronize", ctypes.c_void_p())

    def _use(self, pointer: int) -> None:
        """Use the context of the device that this memory belongs to."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        of_device_ordinal = 9
        self._call("cuPointerGetAttribute", ctypes.byref(device), of_device_ordinal, ctypes.c_uint64(pointer))
        if self._device != device.value:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
            self._allocate()
            self._device = device.value

    def _allocate(self) -> None:
        self._stream = ctypes.c_void_p()
        non_blocking, portable, no_timing = 1, 1, 2
        self._call("cuStreamCreate", ctypes.byref(self._stream), non_blocking)
        self._events = [ctypes.c_void_p() for _ in range(self.COUNT)]
        self._addresses = [ctypes.c_void_p() for _ in range(self.COUNT)]
        for event, address in zip(self._events, self._addresses, strict=True):
            self._call("cuEventCreate", ctypes.byref(event), no_timing)
            self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(CHUNK), portable)
        self._buffers = [
            memoryview((ctypes.c_ubyte * CHUNK).from_address(address.value or 0)).cast("B")
            for address in self._addresses
        ]

    def chunks_to_send(self, pointer: int, start: int, end: int) -> Iterator[memoryview]:
        """The chunks of this memory: while one is sent, the next are copied from the device."""
        self._use(pointer)
        places = range(start, end, CHUNK)
        for number in range(len(places) + self.COUNT - 1):
            if number < len(places):
                self._copy(pointer, places[number], end, number, to_host=True)
            if (due := number - self.COUNT + 1) >= 0:
                slot = due % self.COUNT
                self._call("cuEventSynchronize", self._events[slot])
                yield self._buffers[slot][: min(CHUNK, end - places[due])]

    def chunks_to_fill(self, pointer: int, start: int, end: int) -> Iterator[memoryview]:
        """Chunks for this memory: while one is filled, those before are copied to the device."""
        self._use(pointer)
        try:
            for number, place in enumerate(range(start, end, CHUNK)):
                slot = number % self.COUNT
                if number >= self.COUNT:
                    self._call("cuEventSynchronize", self._events[slot])
                yield self._buffers[slot][: min(CHUNK, end - place)]
                self._copy(pointer, place, end, number, to_host=False)
        finally:  # also after an error: RMM may give the memory to others then
            self._call("cuStreamSynchronize", self._stream)

    def _copy(self, pointer: int, place: int, end: int, number: int, *, to_host: bool) -> None:
        """Begin to copy the chunk with this number between the device, where it begins at `place`, and its buffer."""
        slot = number % self.COUNT
        size, device = ctypes.c_size_t(min(CHUNK, end - place)), ctypes.c_uint64(pointer + place)
        if to_host:
            self._call("cuMemcpyDtoHAsync_v2", self._addresses[slot], device, size, self._stream)
        else:
            self._call("cuMemcpyHtoDAsync_v2", device, self._addresses[slot], size, self._stream)
        self._call("cuEventRecord", self._events[slot], self._stream)
