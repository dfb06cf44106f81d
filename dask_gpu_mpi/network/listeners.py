"""Dask's listeners, for networks with strangers on them: who connects and says nothing is not waited for, nor logged each time.

Dask's own keep a connection that is only half opened for ever, and log a line or a traceback for each that fails; and in a
process without descriptors tornado calls ``accept()`` as fast as it can, and logs a traceback each time. These are put in place
in the agent, before the fork, so that scheduler, nannies and workers have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from distributed.comm import tcp
from distributed.comm.core import Comm, CommClosedError
from distributed.comm.registry import backends
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream
from tornado.netutil import add_accept_handler

from dask_gpu_mpi.network.credentials import clock_problem

# What happens again and again, as one line a minute.

#: Seconds that a line stands for.
PERIOD = 60.0
#: Sources that are counted one by one: whoever has a whole network of addresses must not fill the memory either.
MOST_SOURCES = 1000
#: Sources that a line names.
NAMED = 3


class Tally:
    """Counts what strangers do: the first time is reported at once, what follows once in `PERIOD` seconds, with its number.

    Parameters
    ----------
    report : callable
        ``report(text)`` writes a line.
    later : callable
        ``later(seconds, function)`` calls the function then, as ``loop.call_later`` does.
    clock : callable
        Seconds.

    Examples
    --------
    >>> waiting, times = [], iter((0.0, 60.0, 60.0))
    >>> tally = Tally(print, lambda seconds, function: waiting.append(function), clock=times.__next__)
    >>> for host in ("h1", "h2", "h2"):
    ...     tally.add(f"no handshake with {host}", host)
    no handshake with h1
    >>> waiting.pop()()
    2 more of this kind in 60 s (2 from h2); the last: no handshake with h2
    """

    def __init__(
        self,
        report: Callable[[str], object],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._later = later
        self._clock = clock
        #: When the last line was written; None: a minute or more ago.
        self._since: float | None = None
        self._sources: Counter[str] = Counter()
        self._last = ""

    def add(self, text: str, source: str) -> None:
        """It has happened: `text` says what, `source` who did it."""
        if self._since is None:
            self._begin()
            self._report(text)
            return
        if source not in self._sources and len(self._sources) >= MOST_SOURCES:
            source = "others"
        self._sources[source] += 1
        self._last = text

    def _begin(self) -> None:
        self._since = self._clock()
        self._later(PERIOD, self._end)

    def _end(self) -> None:
        since, self._since = self._since, None
        if not self._sources or since is None:
            return
        total = self._sources.total()
        named = [f"{count} from {source}" for source, count in self._sources.most_common(NAMED)]
        others = len(self._sources) - NAMED
        named += [f"the others from {others} more"] if others > 0 else []
        text = f"{total} more of this kind in {self._clock() - since:.0f} s ({', '.join(named)}); the last: {self._last}"
        self._sources.clear()
        self._begin()
        self._report(text)


#: Below distributed's own, so that it has their handlers and level.
logger = logging.getLogger("distributed.dask_gpu_mpi")

#: Seconds for Dask's greeting after a connection without TLS. With TLS the peer is one of the job's, and may be busy for long.
DASK_HANDSHAKE = 300.0
#: Seconds that a process without descriptors accepts nothing.
PAUSE = 0.5
#: Descriptors that are kept for other things than connections of strangers.
RESERVED = 128
#: What `accept` raises where this process, or the whole system, is out of descriptors or memory (accept(2)).
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: Whether this task reads what may be no greeting at all: that is counted, and `distributed.protocol` need not log a traceback.
_greeting: ContextVar[bool] = ContextVar("_greeting", default=False)
#: Closes each connection that is not known to be of the job's, oldest first.
_unknown: dict[object, Callable[[], object]] = {}


def _later(seconds: float, function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, function)


_refused = Tally(logger.warning, _later)
_exhausted = Tally(logger.warning, _later)


def until_known(close: Callable[[], object]) -> Callable[[], None]:
    """Have `close` called when descriptors run out, until what is returned is called: nobody knows yet who has connected."""
    key = object()
    _unknown[key] = close

    def is_known() -> None:
        _unknown.pop(key, None)

    return is_known


@contextmanager
def _within(seconds: float, close: Callable[[], object]) -> Iterator[list[str]]:
    """Close a connection that is not known until then, or when descriptors run out; the list says why (``""``: the latter)."""
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


def _make_room(why: str) -> None:
    """Close half of the connections that have not shown who they are: who is waited for longest most likely says nothing."""
    for key in list(_unknown)[: (len(_unknown) + 1) // 2]:
        _unknown.pop(key)()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = (
        f"too many connections: {why} (the limit is {limit}); closing those without a handshake, oldest first"
    )
    _exhausted.add(f"{text}. Fix: a higher hard limit (ulimit -Hn)", "this process")


def _refuse(listener: Any, address: str, why: object) -> None:
    text = str(why) or type(why).__name__
    host = address.partition("://")[2].rpartition(":")[0]
    _refused.add(
        f"connection from {address} to {listener.listen_address} failed: {clock_problem(text) or text}", host
    )


class _Quiet:
    """What both listeners share: a connection that fails is counted."""

    async def _handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        try:
            await super()._handle_stream(stream, address)  # type: ignore[misc]
        except OSError as error:  # CommClosedError is one: the peer is gone before there was anything to say
            stream.close()
            if getattr(self, "tcp_server", None) is not None:
                _refuse(self, f"{self.prefix}{address[0]}:{address[1]}", error)  # type: ignore[attr-defined]


class TLSListener(_Quiet, tcp.TLSListener):
    """Distributed's, with a deadline for the handshake of TLS: as long as the other side tries (``comm.timeouts.connect``)."""

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        with _within(_connect_timeout(), stream.close) as why:
            try:
                await stream.wait_for_handshake()
            except OSError as error:
                if why != [""]:
                    _refuse(self, address, why[0] if why else getattr(error, "real_error", None) or error)
                return None
        return stream


class TCPListener(_Quiet, tcp.TCPListener):
    """Distributed's, with a deadline for Dask's greeting, and no traceback for what is none."""

    async def on_connection(self, comm: Comm, handshake_overrides: dict[str, Any] | None = None) -> None:
        """Exchange the greetings."""
        with _within(DASK_HANDSHAKE, comm.abort) as why:
            greeting = _greeting.set(True)
            try:
                await super().on_connection(comm, handshake_overrides)
            except Exception as error:
                comm.abort()
                if why or not isinstance(error, CommClosedError):  # those who hang up are no news
                    _refuse(self, comm.peer_address, why[0] if why else f"no message of Dask's ({error})")
                raise CommClosedError(str(error)) from error
            finally:
                _greeting.reset(greeting)


class TLSBackend(tcp.TLSBackend):
    """``tls://``."""

    _listener_class = TLSListener


class TCPBackend(tcp.TCPBackend):
    """``tcp://``."""

    _listener_class = TCPListener


def _connect_timeout() -> float:
    import dask
    from dask.utils import parse_timedelta

    return float(parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"), default="seconds"))


class PatientSocket:
    """A socket that listens, whose `accept` leaves the event loop alone for a while where there are no descriptors.

    tornado's handler calls it until it raises BlockingIOError, and again as soon as somebody waits, which is at once.

    Parameters
    ----------
    listening : socket.socket
        The real one.
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
        if self._full:  # one at a time then: what tornado accepts in one go is `_unknown` only in the next
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
        # The kernel gives the lowest number that is free. The rest is for everything else that this process has to open.
        if 0 < limit - min(RESERVED, limit // 4) <= connection.fileno():
            self._full = True
            if _unknown:
                _make_room(f"{connection.fileno()} descriptors are in use")
        return connection, address

    def _pause(self, error: OSError) -> None:
        _make_room(str(error.strerror))
        IOLoop.current().update_handler(self.fileno(), 0)
        self._timer = asyncio.get_running_loop().call_later(PAUSE, self._go_on)

    def _go_on(self) -> None:
        if self.fileno() >= 0:
            IOLoop.current().update_handler(self.fileno(), IOLoop.READ)

    def stop(self) -> None:
        """No longer: its handler is removed."""
        if self._timer is not None:
            self._timer.cancel()


def _accept_patiently(listening: Any, callback: Callable[[Any, Any], None]) -> Callable[[], None]:
    """``tornado.netutil.add_accept_handler``, for sockets that run out of descriptors and strangers that are gone at once."""

    def handle(connection: Any, address: Any) -> None:
        try:
            callback(connection, address)
        except Exception as error:  # the socket is closed by its peer while TLS is set up, for example
            connection.close()
            host = str(address[0]) if isinstance(address, tuple) and address else "a local process"
            _refused.add(f"connection from {host} failed: {type(error).__name__}: {error}", host)

    patient = PatientSocket(listening)
    remove = add_accept_handler(patient, handle)  # type: ignore[arg-type]

    def stop() -> None:
        patient.stop()
        remove()

    return stop


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not _greeting.get()


def guard_listeners() -> None:
    """Have all listeners of this process, and of all that are forked from it, be these."""
    logging.getLogger("distributed.protocol.core").addFilter(_is_no_greeting)
    backends["tls"], backends["tcp"] = TLSBackend(), TCPBackend()
    server: Any = importlib.import_module("tornado.tcpserver")
    with contextlib.suppress(AttributeError):
        if server.add_accept_handler is add_accept_handler:
            server.add_accept_handler = _accept_patiently
