"""UCX in a worker's process, started once (`Ucx`), and its endpoints, by which `worker_comm` sends large frames.

Endpoints make progress only during transfers. distributed-ucxx watches UCX as long as there is a connection, which keeps a core
busy (0.46 to 0.52). Here frames are announced over TLS, so both ends know when a transfer begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import importlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from dask_gpu_mpi.base.streams import leave_directory, say
from dask_gpu_mpi.base.timeouts import UCX_PROOF
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.ucx import (
    CLOSED,
    configured_environment,
    configured_numbers,
    import_ucx,
    in_thread,
    opened_by,
)

#: Seconds between calls for progress without a transfer.
TICK = 0.25
#: Seconds after a transfer in which progress is more frequent, and between calls then: data may still be in UCX's buffers.
LINGER, LINGERING_TICK = 0.1, 0.002
#: Seconds for transfers to end when an endpoint is closed.
ABORT_AFTER = 30.0


class UcxError(Exception):
    """UCX can't be started, or an endpoint does not work."""


class Ucx:
    """UCX of this process, in the running event loop; made by `begin`."""

    #: Whether its port, if any, must be on the loopback interface.
    loopback = False
    #: Whether it may lead to other nodes.
    leads = False
    #: The network devices near the worker's GPU; empty: all.
    devices = ""
    #: Whether the user has been warned that it opens a port.
    warned = False
    #: The worker's event loop. Tasks may have others, for further clients.
    _loop: asyncio.AbstractEventLoop | None = None
    #: Done when UCX has started or failed.
    _start: asyncio.Task[Ucx] | None = None

    def __init__(self) -> None:
        from unittest.mock import patch  # takes 20 ms, which workers without UCX need not spend

        import dask
        import ucxx
        from distributed_ucxx import ucxx as backend
        from ucxx._lib import libucxx

        # It warns of an existing CUDA context, which CUDAWorker has created on this worker's GPU.
        log = logging.getLogger("distributed_ucxx.ucxx")
        level = log.level
        log.setLevel(logging.ERROR)
        # Messages by tag only: UCXX also enables RMA and AM, by which peers can read any address.
        tags_alone = functools.partial(
            libucxx.UCXContext, feature_flags=(libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        )
        ports = _ports()
        with (
            patch.object(libucxx, "UCXContext", tags_alone),
            dask.config.set(configured_numbers()),
            patch.dict(os.environ, self._restrictions()),
        ):
            try:
                backend.init_once()  # in this thread, whose CUDA context and event loop UCX must use
            finally:
                log.setLevel(level)
        if not self.warned and (opened := _ports() - ports):
            places = ", ".join(f"{address}:{port}" for address, port in sorted(opened))
            say(
                f"warning: {socket.gethostname()}: UCX of a worker has opened {places} without authentication: anyone who "
                "reaches that can run code as you. Fix: find the setting of UCX_TLS for the workers, and leave it out"
            )
        self._backend: Any = backend
        self._library: Any = ucxx
        self._context: Any = ucxx.core._get_ctx()
        self._pending = 0
        self._poller: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle
        self._polls = self._context.progress_mode == "blocking"
        #: The end of `LINGER` after the last transfer, in the loop's time.
        self._lingers_until = 0.0
        if self._polls:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._context.worker.epoll_file_descriptor)
            self._timer = loop.call_soon(self._tick)

    @classmethod
    def is_of_this_loop(cls) -> bool:
        """Whether the running event loop may use it: the first one that calls this, which is the worker's."""
        loop = asyncio.get_running_loop()
        if cls._loop is None or cls._loop.is_closed():
            cls._loop = loop
        return cls._loop is loop

    @classmethod
    def begin(cls) -> asyncio.Task[Ucx]:
        """Start it, unless it has been started; the task raises a `UcxError`."""
        cls.is_of_this_loop()  # from here on, at the latest
        if cls._start is None or cls._start.cancelled():
            cls._start = asyncio.get_running_loop().create_task(cls._started())
            cls._start.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls._start

    @classmethod
    async def _started(cls) -> Ucx:
        try:
            # takes a second, mostly asleep, in which tasks and transfers over TLS continue
            await in_thread(_import)
            return cls()
        except Exception as error:
            raise UcxError(f"{type(error).__name__}: {error}") from error

    @property
    def address(self) -> bytes:
        """The address of this process for other ends; not a secret, but only sent over TLS."""
        address: bytes = self._library.get_worker_address().tobytes()
        return address

    async def connect(self, address: bytes, *, send_tag: int, receive_tag: int) -> Endpoint:
        """An endpoint to the process with this `address`, which may turn out not to work in the first transfer."""
        try:
            peer = self._library.get_ucx_address_from_buffer(address)
            endpoint = await self._library.create_endpoint_from_worker_address(peer)
        except Exception as error:  # no transport leads there, or the address is invalid
            raise UcxError(f"{type(error).__name__}: {error}") from error
        return Endpoint(self, endpoint, send_tag, receive_tag)

    def synchronize(self) -> None:
        """Wait for the default stream, whose order UCX does not follow."""
        self._backend.synchronize_stream()

    @classmethod
    def _restrictions(cls) -> dict[str, str]:
        """The environment in which others can't reach UCX: it opens a port only if the user has chosen TCP for it."""
        opened = opened_by(os.environ)
        # Otherwise UCX leaves shared memory out, since an endpoint has to detect that its peer has died.
        settings = {"POSIX_ERROR_HANDLING": "y"}
        if not opened:
            settings["TLS"] = CLOSED
        if cls.loopback and opened:
            settings["NET_DEVICES"] = "lo"
        elif cls.devices and not opened:
            settings["NET_DEVICES"] = cls.devices
        chosen = {name.removeprefix("UCX_") for name in os.environ} | set(configured_environment()[1])
        settings = {name: value for name, value in settings.items() if name not in chosen}
        if not opened and (cls.loopback or not cls.leads):
            # No data leaves this node. Devices for RDMA, which a site may have set for MPI, would be open to others.
            settings["NET_DEVICES"] = "lo"
        return {f"UCX_{name}": value for name, value in settings.items()}

    def start(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[str]:
        """Begin a transfer, and make progress until it is over. It must not be cancelled, since UCX uses its buffer.

        The result is the failure as text, or empty.
        """
        task = asyncio.get_running_loop().create_task(self._outcome(operation))
        self._pending += 1
        task.add_done_callback(self._done)
        if self._polls and (self._poller is None or self._poller.done()):
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        return task

    async def _outcome(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> str:
        """The failure of an operation as text: ucxx has a dozen classes of exceptions, and their frames have the buffer.

        A task keeps its exception, and with it the buffer. Python 3.11 crashes if its garbage collector finds a memoryview there
        of which another object has a buffer.
        """
        try:
            await operation()
        except asyncio.CancelledError:
            return "the event loop ends"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _done(self, _: asyncio.Task[str]) -> None:
        self._pending -= 1

    @property
    def broken(self) -> Collection[asyncio.Future[Any]]:
        """Futures that are done if UCX makes no progress any more during a transfer."""
        return () if self._poller is None else (self._poller,)

    async def _poll(self) -> None:
        """Make progress during transfers. A later transfer starts another poller, and does not wait for `_tick`."""
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
        """Make progress from time to time, by which UCX detects peers that have ended."""
        loop = asyncio.get_running_loop()
        lingers = loop.time() < self._lingers_until
        self._timer = loop.call_later(LINGERING_TICK if lingers else TICK, self._tick)
        self._context.worker.progress()


def _import() -> None:
    """The slow part of the start, which needs neither the event loop nor a CUDA context, in a thread.

    Tasks use this process's working directory meanwhile, and a file there would configure UCX.
    """
    if not leave_directory() and os.path.lexists("ucx.conf"):
        raise InputError(
            "the file ucx.conf in the working directory may be anyone's",
            fix="remove it, or use UCX_CONFIG_DIR",
        )
    import_ucx()
    importlib.import_module("distributed_ucxx.ucxx")
    with contextlib.suppress(ImportError):  # not necessary for host memory
        importlib.import_module("rmm")


def _ports() -> set[tuple[str, int]]:
    """The TCP addresses and ports on which this process listens."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.Process().net_connections("tcp")
        return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}
    return set()


class Endpoint:
    """One end of a connection over UCX.

    The tags have 64 bits, and only the two ends know them: UCX accepts a message from every peer with its tag.
    """

    def __init__(self, ucx: Ucx, endpoint: Any, send_tag: int, receive_tag: int) -> None:
        from ucxx.types import Tag

        self.ucx = ucx
        self._endpoint = endpoint
        self._send_tag = Tag(send_tag)
        self._receive_tag = Tag(receive_tag)
        #: Transfers.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        #: Done when this end is closed.
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def send(self, *buffers: Any) -> None:
        """Send buffers that the other end expects, one after the other."""
        for buffer in buffers:
            await self._run(
                functools.partial(self._endpoint.send, buffer, tag=self._send_tag, force_tag=True)
            )

    async def receive(self, *buffers: Any) -> None:
        """Fill buffers of the sizes of those that are sent."""
        for buffer in buffers:
            await self._run(
                functools.partial(self._endpoint.recv, buffer, tag=self._receive_tag, force_tag=True)
            )

    async def _run(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self._closed.done():
            raise UcxError("the endpoint was closed")
        task = self.ucx.start(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends: set[asyncio.Future[Any]] = {task, self._closed, *self.ucx.broken}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failure := self._failure(task):
            raise UcxError(failure)

    def _failure(self, task: asyncio.Task[str]) -> str:
        if not task.done():
            broken = [
                "the event loop ends" if each.cancelled() else str(each.exception())
                for each in self.ucx.broken
                if each.done()
            ]
            return broken[0] if broken else "the endpoint was closed"
        if task.cancelled():
            return "the event loop ends"
        if failure := task.result():
            return failure
        return "" if not self._closed.done() and self._endpoint.alive else "the endpoint was closed"

    def synchronize(self) -> None:
        """Wait for the default stream, whose order UCX does not follow."""
        self.ucx.synchronize()

    def abort(self) -> None:
        """Close it, so that `send` and `receive` raise at once. May be called again.

        UCX's own endpoint is closed after the transfers: otherwise UCX 1.21 crashes at times, in this process or in the other.
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


#: Bytes of a proof.
PROOF_SIZE = 64


async def proven_endpoint(
    ucx: Ucx, own: dict[str, Any], other: dict[str, Any]
) -> tuple[Endpoint | None, str]:
    """An endpoint to the other end of a TLS connection, which does the same, or the reason why there is none.

    `own` and `other` have been exchanged over TLS: each end's UCX address, the tag of messages to it, and a key. By the keys both
    ends prove over UCX that it leads to this peer.
    """
    endpoint: Endpoint | None = None
    try:
        endpoint = await ucx.connect(other["address"], send_tag=other["tag"], receive_tag=own["tag"])
        async with asyncio.timeout(UCX_PROOF):
            await _exchange_proofs(endpoint, own["key"], other["key"])
        return endpoint, ""
    except BaseException as error:
        if endpoint is not None:
            endpoint.abort()
        if not isinstance(error, (UcxError, TimeoutError)):
            raise
        return None, str(error) or f"no answer over UCX within {UCX_PROOF:g} s"


async def _exchange_proofs(endpoint: Endpoint, own: bytes, other: bytes) -> None:
    both = b"".join(sorted((own, other)))

    def proof(sender: bytes) -> bytes:
        return hmac.digest(both, b"dask-gpu-mpi ucx proof" + sender, "sha512")

    received = bytearray(PROOF_SIZE)
    await asyncio.gather(endpoint.send(proof(own)), endpoint.receive(received))
    if not hmac.compare_digest(received, proof(other)):
        raise UcxError("the data over UCX are not from this peer")
