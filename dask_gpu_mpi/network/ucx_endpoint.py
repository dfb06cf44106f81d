"""UCX in a worker's process: started once, and endpoints that make progress only while something is under way.

distributed-ucxx watches UCX as long as there is a connection, which keeps a core busy (0.46 to 0.52). Here both ends know when a
frame comes, since it is announced over TLS: between frames UCX is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .ucx import SECTION, aside, configured_numbers, import_ucx

__all__ = ["Endpoint", "Ucx", "UcxError"]


#: Seconds for which progress goes on after a transfer, and between progress otherwise.
LINGER, TICK = 0.1, 0.25


class UcxError(Exception):
    """UCX can't be started, or an endpoint does not work; the text says why."""


class Ucx:
    """UCX of this process, in the running event loop; made by `begin`."""

    #: Whether it is to listen on the loopback interface alone.
    loopback = False
    #: Done when UCX is there, or has failed.
    _start: asyncio.Task[Ucx] | None = None

    def __init__(self) -> None:
        import dask
        import ucxx
        from distributed_ucxx import ucxx as backend

        with _unwarned(), dask.config.set({**configured_numbers(), **self._devices()}):
            backend.init_once()  # in this thread, whose CUDA context and event loop UCX is to use
        self._backend: Any = backend
        self._library: Any = ucxx
        self._context: Any = ucxx.core._get_ctx()
        self._pending = 0
        self._poller: asyncio.Task[None] | None = None
        self._polls = self._context.progress_mode == "blocking"
        if self._polls:
            asyncio.get_running_loop().remove_reader(self._context.worker.epoll_file_descriptor)
            self._tick()

    @classmethod
    def begin(cls) -> asyncio.Task[Ucx]:
        """Have it start, if it does not already; what fails is raised, as `UcxError`, where the result is awaited."""
        if cls._start is None:
            cls._start = asyncio.get_running_loop().create_task(cls._started())
            cls._start.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls._start

    @classmethod
    async def _started(cls) -> Ucx:
        try:
            # A second, and asleep for most of it, in which tasks and transfers over TLS go on
            await aside(_import)
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
        peer = self._library.get_ucx_address_from_buffer(address)
        endpoint = await self._library.create_endpoint_from_worker_address(peer)
        return Endpoint(self, endpoint, send_tag, receive_tag)

    def device_array(self, size: int) -> Any:
        """Memory of `size` bytes on this process's GPU."""
        return self._backend.device_array(size)

    def synchronize(self) -> None:
        """Wait for the default stream: UCX knows nothing of CUDA's order."""
        self._backend.synchronize_stream()

    @classmethod
    def _devices(cls) -> dict[str, Any]:
        """The configuration by which UCX listens on the loopback interface alone, unless the user has chosen its devices."""
        import dask

        configured = dask.config.get(f"{SECTION}.environment", None) or {}
        chosen = any(name.upper().replace("-", "_") == "NET_DEVICES" for name in configured)
        if not cls.loopback or chosen or "UCX_NET_DEVICES" in os.environ:
            return {}
        return {f"{SECTION}.environment.net-devices": "lo"}

    async def run(self, operation: Awaitable[Any]) -> None:
        """Wait for a send or receive, and make UCX's progress meanwhile."""
        if not self._polls:
            await operation
            return
        self._pending += 1
        task = asyncio.ensure_future(operation)
        try:
            if self._poller is None:
                self._poller = asyncio.get_running_loop().create_task(self._poll())
            poller = self._poller
            await asyncio.wait({task, poller}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                poller.result()  # what UCX has raised
            await task
        finally:
            self._pending -= 1
            task.cancel()

    async def _poll(self) -> None:
        """Make progress while something is under way, and for a moment more: what has been sent may still be in UCX's buffers."""
        loop = asyncio.get_running_loop()
        try:
            until = loop.time() + LINGER
            while self._pending or loop.time() < until:
                self._context.worker.progress()
                if self._pending:
                    until = loop.time() + LINGER
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(LINGER / 50)
        finally:
            self._poller = None

    def _tick(self) -> None:
        """Progress now and then, whatever is under way: UCX asks for it, to notice what has ended."""
        self._context.worker.progress()
        asyncio.get_running_loop().call_later(TICK, self._tick)


def _import() -> None:
    """All that takes long and needs neither the event loop nor a CUDA context."""
    import_ucx()
    importlib.import_module("distributed_ucxx.ucxx")
    with contextlib.suppress(ImportError):  # host memory needs none
        importlib.import_module("rmm")


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

    async def send(self, buffer: Any) -> None:
        """Send `buffer`, which the other end expects."""
        await self._run(lambda endpoint: endpoint.send(buffer, tag=self._send_tag, force_tag=True))

    async def receive(self, buffer: Any) -> None:
        """Fill `buffer`, of the size of what was sent."""
        await self._run(lambda endpoint: endpoint.recv(buffer, tag=self._receive_tag, force_tag=True))

    async def _run(self, operation: Callable[[Any], Awaitable[Any]]) -> None:
        if self._endpoint is None:
            raise UcxError("the endpoint was closed")
        try:
            await self.ucx.run(operation(self._endpoint))
        except Exception as error:  # ucxx has a dozen classes, which differ between its versions
            raise UcxError(f"{type(error).__name__}: {error}") from error
        if self._endpoint is None or not self._endpoint.alive:
            raise UcxError("the endpoint was closed")

    def abort(self) -> None:
        """Close it at once; what waits in `send` or `receive` raises. May be called again."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort()
