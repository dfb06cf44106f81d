"""Hardened replacements for Dask's listeners: handshakes time out, and failures are rate-limited in the log.

Dask's own keep a half-open connection forever, and log a line or a traceback for each that fails. In a process without free
descriptors tornado calls ``accept()`` as fast as it can, and logs a traceback each time. The agent installs the replacements
before it forks, so that scheduler, nannies and workers have them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm import tcp
from distributed.comm.core import Comm, CommClosedError
from distributed.comm.registry import backends
from distributed.node import ServerNode
from tornado import tcpserver
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, StreamClosedError
from tornado.netutil import add_accept_handler

from dask_gpu_mpi.network.credentials import clock_problem
from dask_gpu_mpi.network.interfaces import as_host

#: Seconds that a line of a `Tally` covers.
PERIOD = 60.0
#: Seconds for Dask's greeting after a connection without TLS. With TLS the peer is one of the job, and may be busy for long.
DASK_HANDSHAKE = 300.0
#: Seconds for which a process without descriptors accepts nothing.
PAUSE = 0.5
#: Descriptors that are reserved for other things than connections of strangers.
RESERVED = 128
#: The errors of `accept` if this process, or the whole system, is out of descriptors or memory (accept(2)).
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


#: Below distributed's own, so that it has their handlers and level.
logger = logging.getLogger("distributed.dask_gpu_mpi")


class Tally:
    """Rate-limits the warnings of an event: the first is logged at once, the following ones together after `PERIOD` seconds."""

    def __init__(self) -> None:
        #: Whether a line was written within the last `PERIOD` seconds; and the later events.
        self._waits = False
        self._count, self._last = 0, ""

    def add(self, text: str) -> None:
        """Count an event, described by `text`."""
        if self._waits:
            self._count, self._last = self._count + 1, text
        else:
            self._log(text)

    def _log(self, text: str) -> None:
        self._waits, self._count = True, 0
        asyncio.get_running_loop().call_later(PERIOD, self._end)
        logger.warning(text)

    def _end(self) -> None:
        self._waits = False
        if self._count:
            self._log(f"{self._count} more of this kind in {PERIOD:.0f} s; the last: {self._last}")


#: Whether this task reads a greeting: an invalid one is counted, and `distributed.protocol` must not log a traceback.
_greeting: ContextVar[bool] = ContextVar("_greeting", default=False)
#: Functions that close the connections whose peers may be strangers, oldest first.
_unknown: dict[object, Callable[[], object]] = {}


#: Connections that failed, and those that were closed for want of descriptors.
_refused, _exhausted = Tally(), Tally()


def until_known(close: Callable[[], object]) -> Callable[[], None]:
    """Register a connection of a possible stranger, to be closed when descriptors run out; the result unregisters it."""
    key = object()
    _unknown[key] = close

    def is_known() -> None:
        _unknown.pop(key, None)

    return is_known


@contextmanager
def _within(seconds: float, close: Callable[[], object]) -> Iterator[list[str]]:
    """Close a connection after these seconds, or when descriptors run out; the list has the reason (``""`` for the latter)."""
    why: list[str] = []

    def end(text: str) -> None:
        why.append(text)
        close()

    is_known = until_known(lambda: end(""))
    timer = asyncio.get_running_loop().call_later(seconds, end, f"no handshake within {seconds:g} s")
    try:
        yield why
    finally:
        timer.cancel()
        is_known()


def _close_oldest(why: str) -> None:
    """Close half of the connections without a handshake, oldest first: they are the least likely ones to complete it."""
    for key in list(_unknown)[: (len(_unknown) + 1) // 2]:
        _unknown.pop(key)()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    _exhausted.add(
        f"too many connections: {why} (the limit is {limit}); closing those without a handshake, oldest first. "
        "Fix: a higher hard limit (ulimit -Hn)"
    )


def _refuse(listener: Any, address: str, why: object) -> None:
    text = str(why) or type(why).__name__
    _refused.add(
        f"connection from {address} to {listener.listen_address} failed: {clock_problem(text) or text}"
    )


class _Quiet:
    """Counts connections that fail."""

    async def _handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        try:
            await super()._handle_stream(stream, address)  # type: ignore[misc]
        except OSError as error:  # includes CommClosedError: the peer is gone already
            stream.close()
            if getattr(self, "tcp_server", None) is not None:
                _refuse(self, f"{self.prefix}{as_host(address[0])}:{address[1]}", error)  # type: ignore[attr-defined]


class TLSListener(_Quiet, tcp.TLSListener):
    """Distributed's, with the deadline of the other side (``comm.timeouts.connect``) for the handshake of TLS."""

    def __init__(self, *args: Any, ssl_context: ssl.SSLContext | None = None, **kwargs: Any) -> None:
        if ssl_context is not None:  # otherwise distributed raises an error
            # No process of a job resumes a session. To make the two tickets for that is a third of a handshake's CPU time.
            ssl_context.num_tickets = 0
        super().__init__(*args, ssl_context=ssl_context, **kwargs)

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        connect = dask.config.get("distributed.comm.timeouts.connect")
        with _within(parse_timedelta(connect, default="seconds"), stream.close) as why:
            try:
                await stream.wait_for_handshake()
            except OSError as error:
                cause = getattr(error, "real_error", None) or error
                hangs_up = isinstance(cause, (ssl.SSLEOFError, ConnectionError, StreamClosedError))
                if why != [""] and (why or not hangs_up):  # a peer that hangs up is not reported
                    _refuse(self, address, why[0] if why else cause)
                return None
        return stream


class TCPListener(_Quiet, tcp.TCPListener):
    """Distributed's, with a deadline for Dask's greeting, and without a traceback for an invalid one."""

    async def on_connection(self, comm: Comm, handshake_overrides: dict[str, Any] | None = None) -> None:
        """Exchange the greetings."""
        with _within(DASK_HANDSHAKE, comm.abort) as why:
            greeting = _greeting.set(True)
            try:
                await super().on_connection(comm, handshake_overrides)
            except Exception as error:
                comm.abort()
                if why or not isinstance(error, CommClosedError):  # a peer that hangs up is not reported
                    _refuse(self, comm.peer_address, why[0] if why else f"no message of Dask's ({error})")
                raise CommClosedError(str(error)) from error
            finally:
                _greeting.reset(greeting)


class TLSBackend(tcp.TLSBackend):
    """Distributed's, with our listener."""

    def get_listener(self, *args: Any, **kwargs: Any) -> TLSListener:
        """Called by distributed."""
        return TLSListener(*args, **kwargs)


class TCPBackend(tcp.TCPBackend):
    """Distributed's, with our listener."""

    def get_listener(self, *args: Any, **kwargs: Any) -> TCPListener:
        """Called by distributed."""
        return TCPListener(*args, **kwargs)


class PatientSocket:
    """A listening socket whose `accept` pauses when there are no descriptors.

    tornado's handler calls it until it raises BlockingIOError, and again as soon as a peer waits, which is at once.
    """

    def __init__(self, listening: Any) -> None:
        self._listening = listening
        self._timer: asyncio.TimerHandle | None = None
        self._full = False

    def fileno(self) -> int:
        """Its descriptor, for the event loop."""
        number: int = self._listening.fileno()
        return number

    def accept(self) -> tuple[Any, Any]:
        """As ``socket.accept``."""
        if self._full:  # one at a time, since `_unknown` has the connections that tornado accepts together only afterwards
            self._full = False
            raise BlockingIOError(errno.EAGAIN, "few descriptors are left")
        try:
            connection, address = self._listening.accept()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._pause(error)
            raise BlockingIOError(errno.EAGAIN, "out of descriptors") from None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The kernel gives the lowest free number, and the rest is for all other files of this process.
        if 0 < limit - min(RESERVED, limit // 4) <= connection.fileno():
            self._full = True
            if _unknown:
                _close_oldest(f"{connection.fileno()} descriptors are in use")
        return connection, address

    def _pause(self, error: OSError) -> None:
        _close_oldest(str(error.strerror))
        IOLoop.current().update_handler(self.fileno(), 0)
        self._timer = asyncio.get_running_loop().call_later(PAUSE, self._resume)

    def _resume(self) -> None:
        if self.fileno() >= 0:
            IOLoop.current().update_handler(self.fileno(), IOLoop.READ)

    def stop(self) -> None:
        """Cancel a pause, when its handler is removed."""
        if self._timer is not None:
            self._timer.cancel()


def _accept_patiently(listening: Any, callback: Callable[[Any, Any], None]) -> Callable[[], None]:
    """``tornado.netutil.add_accept_handler`` that survives a lack of descriptors, and peers that are gone at once."""

    def handle(connection: Any, address: Any) -> None:
        try:
            callback(connection, address)
        except Exception as error:  # for example, the peer closes the socket while TLS is set up
            connection.close()
            _refused.add(f"connection from {address[0]} failed: {type(error).__name__}: {error}")

    patient = PatientSocket(listening)
    remove = add_accept_handler(patient, handle)  # type: ignore[arg-type]

    def stop() -> None:
        patient.stop()
        remove()

    return stop


#: Distributed's, which starts one for servers without routes, too, and every user of the node could reach it.
_start_http_server = ServerNode.start_http_server


def _start_http_server_for_routes(self: ServerNode, routes: list[Any], *args: Any, **kwargs: Any) -> None:
    if routes:
        _start_http_server(self, routes, *args, **kwargs)


def guard_listeners() -> None:
    """Install these listeners in this process, and in all that are forked from it. May be called again."""
    logging.getLogger("distributed.protocol.core").addFilter(_is_no_greeting)
    backends["tls"], backends["tcp"] = TLSBackend(), TCPBackend()
    tcpserver.add_accept_handler = _accept_patiently  # type: ignore[assignment, attr-defined]
    listen_where_routes_are()


def listen_where_routes_are() -> None:
    """Start no HTTP server without routes, in this process and those forked from it."""
    ServerNode.start_http_server = _start_http_server_for_routes  # type: ignore[method-assign]


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not _greeting.get()
