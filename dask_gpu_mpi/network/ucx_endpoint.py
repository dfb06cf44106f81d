"""UCX in a worker's process: started once, and endpoints that make progress only while something is under way.

distributed-ucxx watches UCX as long as there is a connection, which keeps a core busy (0.46 to 0.52). Here both ends know when a
frame comes, since it is announced over TLS: between frames UCX is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any
from unittest.mock import patch

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.network.ucx import (
    CLOSED,
    configured_environment,
    configured_numbers,
    import_ucx_in_thread,
    in_thread,
    opened_by,
)

__all__ = ["Endpoint", "Ucx", "UcxError"]


#: Seconds between progress where nothing is under way.
TICK = 0.25
#: Seconds after a transfer in which there is more of it, and between it: what has been sent may still be in UCX's buffers.
LINGER, LINGERING_TICK = 0.1, 0.002
#: Seconds for what is under way when an endpoint is closed.
ABORT_AFTER = 30.0


class UcxError(Exception):
    """UCX can't be started, or an endpoint does not work; the text says why."""


class Ucx:
    """UCX of this process, in the running event loop; made by `begin`."""

    #: Whether a port of it is to be one of the loopback interface alone.
    loopback = False
    #: Whether it may lead to other nodes.
    leads = False
    #: Whether the user knows that it opens a port.
    warned = False
    #: The event loop that has it: the worker's. Tasks may have others, for clients of their own.
    _loop: asyncio.AbstractEventLoop | None = None
    #: Done when UCX is there, or has failed.
    _start: asyncio.Task[Ucx] | None = None

    def __init__(self) -> None:
        import dask
        import ucxx
        from distributed_ucxx import ucxx as backend

        ports = _ports()
        with (
            _unwarned(),
            _tags_alone(),
            dask.config.set(configured_numbers()),
            patch.dict(os.environ, self._restrictions()),
        ):
            backend.init_once()  # in this thread, whose CUDA context and event loop UCX is to use
        if not self.warned and (opened := _ports() - ports):
            places = ", ".join(f"{address}:{port}" for address, port in sorted(opened))
            say(
                f"warning: {socket.gethostname()}: UCX of a worker has opened {places} and checks nobody: anyone who reaches "
                "that can run code as you. Fix: find what sets UCX_TLS for the workers, and leave it out"
            )
        self._backend: Any = backend
        self._library: Any = ucxx
        self._context: Any = ucxx.core._get_ctx()
        self._pending = 0
        self._poller: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle
        self._polls = self._context.progress_mode == "blocking"
        #: Until when, in the loop's time, the last transfer lingers.
        self._lingers_until = 0.0
        if self._polls:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._context.worker.epoll_file_descriptor)
            self._timer = loop.call_soon(self._tick)

    @classmethod
    def is_of_this_loop(cls) -> bool:
        """Whether the running event loop may use it: the first one that asks, which is the worker's."""
        loop = asyncio.get_running_loop()
        if cls._loop is None or cls._loop.is_closed():
            cls._loop = loop
        return cls._loop is loop

    @classmethod
    def begin(cls) -> asyncio.Task[Ucx]:
        """Have it start, if it does not already; what fails is raised, as `UcxError`, where the result is awaited."""
        cls.is_of_this_loop()  # from here on, at the latest
        if cls._start is None or cls._start.cancelled():
            cls._start = asyncio.get_running_loop().create_task(cls._started())
            cls._start.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls._start

    @classmethod
    async def _started(cls) -> Ucx:
        try:
            # A second, and asleep for most of it, in which tasks and transfers over TLS go on
            await in_thread(_import)
            return cls()
        except Exception as error:
            raise UcxError(f"{type(error).__name__}: {error}") from error

    @property
    def address(self) -> bytes:
        """Where others reach this process; no secret, but sent over TLS alone."""
        address: bytes = self._library.get_worker_address().tobytes()
        return address

    async def connect(self, address: bytes, *, send_tag: int, receive_tag: int) -> Endpoint:
        """An endpoint to the process with this `address`. That it works is known once something has come over it."""
        try:
            peer = self._library.get_ucx_address_from_buffer(address)
            endpoint = await self._library.create_endpoint_from_worker_address(peer)
        except Exception as error:  # no transport leads there, or that is no address
            raise UcxError(f"{type(error).__name__}: {error}") from error
        return Endpoint(self, endpoint, send_tag, receive_tag)

    def device_array(self, size: int) -> Any:
        """Memory of `size` bytes on this process's GPU."""
        return self._backend.device_array(size)

    def synchronize(self) -> None:
        """Wait for the default stream: UCX knows nothing of CUDA's order."""
        self._backend.synchronize_stream()

    @classmethod
    def _restrictions(cls) -> dict[str, str]:
        """The environment in which others do not reach UCX: it opens a port only if the user has chosen TCP for it."""
        opened = opened_by(os.environ)
        # Without it UCX leaves shared memory out, since an endpoint has to notice that its peer has died.
        settings = {"POSIX_ERROR_HANDLING": "y"}
        if not opened:
            settings["TLS"] = CLOSED
        if cls.loopback and opened:
            settings["NET_DEVICES"] = "lo"
        chosen = {name.removeprefix("UCX_") for name in os.environ} | set(configured_environment()[1])
        settings = {name: value for name, value in settings.items() if name not in chosen}
        if not opened and (cls.loopback or not cls.leads):
            # Nothing leaves this node. Devices for RDMA would be open to others, and a site may have set them for MPI.
            settings["NET_DEVICES"] = "lo"
        return {f"UCX_{name}": value for name, value in settings.items()}

    def start(self, operation: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a send or receive, and make UCX's progress until it is over. Nobody may cancel it: UCX has its buffer so long."""
        task = asyncio.get_running_loop().create_task(operation)
        self._pending += 1
        task.add_done_callback(self._done)
        if self._polls and (self._poller is None or self._poller.done()):
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._pending -= 1
        if not task.cancelled():
            task.exception()  # else asyncio complains where nobody waits for it any more

    @property
    def broken(self) -> Collection[asyncio.Future[Any]]:
        """What is done where UCX makes no progress any more, while something is under way."""
        return () if self._poller is None else (self._poller,)

    async def _poll(self) -> None:
        """Make progress while something is under way. The next transfer has its own poller, and does not wait for `_tick`."""
        try:
            while self._pending:
                self._context.worker.progress()
                await asyncio.sleep(0)
        except Exception as error:
            raise UcxError(f"{type(error).__name__}: {error}") from None
        loop = asyncio.get_running_loop()
        self._lingers_until = loop.time() + LINGER
        self._timer.cancel()
        self._timer = loop.call_soon(self._tick)

    def _tick(self) -> None:
        """Progress now and then, whatever is under way: UCX asks for it, to notice what has ended."""
        loop = asyncio.get_running_loop()
        lingers = loop.time() < self._lingers_until
        self._timer = loop.call_later(LINGERING_TICK if lingers else TICK, self._tick)
        self._context.worker.progress()


def _import() -> None:
    """All that takes long and needs neither the event loop nor a CUDA context."""
    import_ucx_in_thread()
    importlib.import_module("distributed_ucxx.ucxx")
    with contextlib.suppress(ImportError):  # host memory needs none
        importlib.import_module("rmm")


def _ports() -> set[tuple[str, int]]:
    """Where this process listens by TCP."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.Process().net_connections("tcp")
        return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}
    return set()


@contextlib.contextmanager
def _tags_alone() -> Iterator[None]:
    """Start UCX in here with messages by tag alone: with its features RMA and AM, which UCXX has on, it answers requests to read
    any address of this process.
    """
    from ucxx._lib import libucxx

    original = libucxx.UCXContext
    features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
    libucxx.UCXContext = functools.partial(original, feature_flags=features)
    try:
        yield
    finally:
        libucxx.UCXContext = original


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without distributed-ucxx's warning of a CUDA context that is there: CUDAWorker has made it, on this worker's GPU."""
    logger = logging.getLogger("distributed_ucxx.ucxx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Endpoint:
    """One end of a connection over UCX.

    Parameters
    ----------
    ucx : Ucx
        Of this process.
    endpoint : ucxx.Endpoint
        To the other one.
    send_tag, receive_tag : int
        Of 64 bits, which only the two ends know: UCX takes a message from whoever has its tag.
    """

    def __init__(self, ucx: Ucx, endpoint: Any, send_tag: int, receive_tag: int) -> None:
        from ucxx.types import Tag

        self.ucx = ucx
        self._endpoint = endpoint
        self._send_tag = Tag(send_tag)
        self._receive_tag = Tag(receive_tag)
        #: What is under way.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        #: Done when this end is closed.
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def send(self, buffer: Any) -> None:
        """Send `buffer`, which the other end expects."""
        await self._run(lambda: self._endpoint.send(buffer, tag=self._send_tag, force_tag=True))

    async def receive(self, buffer: Any) -> None:
        """Fill `buffer`, of the size of what was sent."""
        await self._run(lambda: self._endpoint.recv(buffer, tag=self._receive_tag, force_tag=True))

    async def _run(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self._closed.done():
            raise UcxError("the endpoint was closed")
        task = self.ucx.start(operation())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task, self._closed, *self.ucx.broken}, return_when=asyncio.FIRST_COMPLETED)
            failure = self._failure(task)
        finally:
            # An exception has this frame, and the task the exception: a cycle with buffers in it, which Python must not collect:
            # it takes a memoryview apart that somebody else still has a buffer of.
            del task, operation
        if failure:
            raise UcxError(failure)

    def _failure(self, task: asyncio.Task[Any]) -> str:
        """Why an operation has failed, in words: ucxx has a dozen classes, and their frames have the buffer."""
        if not task.done():
            broken = [
                "the event loop ends" if each.cancelled() else str(each.exception())
                for each in self.ucx.broken
                if each.done()
            ]
            return broken[0] if broken else "the endpoint was closed"
        if task.cancelled():
            return "the event loop ends"
        if (error := task.exception()) is not None:
            return f"{type(error).__name__}: {error}"
        return "" if not self._closed.done() and self._endpoint.alive else "the endpoint was closed"

    def abort(self) -> None:
        """Close it; what waits in `send` or `receive` raises at once. May be called again.

        UCX's own end follows when nothing is under way any more: closed in the middle of a transfer, UCX 1.21 crashes at times,
        in this process or in the other.
        """
        if self._closed.done() or self._loop.is_closed():
            return
        self._closed.set_result(None)
        self._abort_when_idle(self._loop.time() + ABORT_AFTER)

    def _abort_when_idle(self, deadline: float) -> None:
        if self._tasks and self._loop.time() < deadline:
            self._loop.call_later(0.05, self._abort_when_idle, deadline)
        else:
            self._endpoint.abort()
