"""Tests of the network before the start: whether all ranks reach the scheduler's address, and the nodes reach each other.

Both sides of a connection send a random text that they received by MPI, so that another program's listener is detected. The
connections also compare the clocks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import cast

from dask_gpu_mpi.base.text import fold_names
from dask_gpu_mpi.options.model import Options

#: Seconds that a rank tries to connect.
CONNECT_TIMEOUT = 5.0
#: Connections that wait to be accepted: all ranks of a large job connect at once.
BACKLOG = 4096
#: Connections that are open at the same time, each for moments. Descriptors are scarce in a rank.
MOST_ASKING = 256
#: Seconds between checks for the end.
POLL = 0.05
#: Tries of a rank, and seconds between them, if the listener hangs up: it does so when many strangers connect.
TRIES, PAUSE = 3, 0.1
#: Nodes to which each node connects, and which connect to it, at most: a bound on its sockets, since all are tried at once.
#: An even number.
MOST_PEERS = 16
#: Parts of a report that are listed; the others are counted.
MOST_PARTS = 6
#: Ports of a range that are tried.
MOST_PORTS = 1000
_OTHER, _SILENT, _RESET = "something else answers there", "no answer", os.strerror(errno.ECONNRESET)
_CLOCK = struct.Struct("!d")


def listener_token() -> str:
    """The text of a listener: the connecting side sends the first half, and the listener answers with the second."""
    return secrets.token_hex(64)


def _halves(token: str) -> tuple[bytes, bytes]:
    half = len(token) // 2
    return token[:half].encode(), token[half:].encode()


@dataclass(frozen=True)
class Reach:
    """The result of connecting to a listener. A rank sends that of the scheduler's, with the nodes that it did not reach."""

    #: Why it failed; empty: it did not, or there was no listener to connect to.
    error: str = ""
    #: Seconds that this rank's clock is ahead of the listener's (negative: behind), corrected by half of the round trip.
    #: None: unknown.
    ahead: float | None = None
    #: Seconds.
    round_trip: float = 0.0
    #: By error the hosts of other nodes that were not reached; only in what a rank sends.
    lost: dict[str, list[str]] = field(default_factory=dict)


class Listener:
    """Listens, in a thread, on an IP address and `port` (0: any), and answers peers that send the right text; raises OSError.

    It listens for moments. If too many peers are silent meanwhile, the oldest are disconnected.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._question, self._answer = _halves(token)
        self._listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind((address, port))
            self._listening.listen(BACKLOG)
        except OSError:
            self._listening.close()
            raise
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        #: By connection, oldest first, the text that it has sent so far.
        self._asking: dict[socket.socket, bytes] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(POLL):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._read(cast(socket.socket, key.fileobj))
        for connection in list(self._asking):
            self._hang_up(connection)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:  # the peer is gone
            return
        except OSError:  # there are no descriptors
            time.sleep(0.0 if self._close_oldest() else POLL)
            return
        connection.setblocking(False)
        self._asking[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._asking) > MOST_ASKING:
            self._close_oldest()

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._asking:  # closed a moment ago
            return
        text = self._asking[connection]
        try:
            piece = connection.recv(len(self._question) - len(text))
            text += piece
            if piece and len(text) < len(self._question):
                self._asking[connection] = text
                return
            if hmac.compare_digest(text, self._question):
                # fits into the buffer of every socket
                connection.send(self._answer + _CLOCK.pack(time.time()))
        except BlockingIOError:
            return
        except OSError:
            pass
        self._hang_up(connection)

    def _close_oldest(self) -> bool:
        """Close the oldest connection; False: there is none."""
        if oldest := next(iter(self._asking), None):
            self._hang_up(oldest)
        return oldest is not None

    def _hang_up(self, connection: socket.socket) -> None:
        del self._asking[connection]
        self._selector.unregister(connection)
        connection.close()


def connect_to(address: str, port: int, token: str, timeout: float = CONNECT_TIMEOUT) -> Reach:
    """Connect to a `Listener`, and compare clocks; each of `TRIES` takes at most twice the timeout."""
    reach = _ask(address, port, token, timeout)
    for _ in range(TRIES - 1):
        if reach.error not in (_SILENT, _RESET):
            break
        time.sleep(PAUSE)
        again = _ask(address, port, token, timeout)
        reach = reach if again.error else again
    return replace(reach, error=_OTHER) if reach.error == _SILENT else reach


def _ask(address: str, port: int, token: str, timeout: float) -> Reach:
    question, wanted = _halves(token)
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            limit = time.monotonic() + timeout
            sent, started = time.time(), time.monotonic()
            connection.sendall(question)
            got = b""
            while len(got) < len(wanted) + _CLOCK.size:
                connection.settimeout(max(0.01, limit - time.monotonic()))
                piece = connection.recv(4096)
                if not piece:
                    break
                got += piece
            round_trip = time.monotonic() - started
    except TimeoutError:
        return Reach(f"no answer within {timeout:g} s")
    except OSError as error:
        return Reach(error.strerror or str(error))
    if got[: len(wanted)] != wanted or len(got) != len(wanted) + _CLOCK.size:
        return Reach(_OTHER if got else _SILENT)
    (there,) = _CLOCK.unpack(got[len(wanted) :])
    return Reach("", sent + round_trip / 2 - there, round_trip)


def connect_only(address: str, port: int, timeout: float = CONNECT_TIMEOUT) -> str:
    """Connect to any listener, and disconnect; returns the error, or an empty text."""
    try:
        socket.create_connection((address, port), timeout=timeout).close()
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_elsewhere(error: BaseException) -> bool:
    """Whether the error means that the address to listen at is not one of this node."""
    return isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL


# Pairs of nodes. Workers of two nodes connect to each other in both directions, whichever node has the scheduler.


@dataclass(frozen=True)
class Node:
    """A rank that listens: the scheduler's, or for its node the lowest rank with workers."""

    host: str
    rank: int
    address: str
    #: Of this node only: another node may have the same address, on a network that leads nowhere. Empty: a running scheduler's,
    #: which answers no token.
    token: str = field(default_factory=listener_token)
    #: 0: it can't listen.
    port: int = 0


def _steps(nodes: int) -> list[int]:
    """The distances of a node's peers on a ring of all nodes.

    They are the same for all nodes, so each node has as many connections in as out, and each pair is tested in both directions.
    """
    if nodes - 1 <= MOST_PEERS:
        return list(range(1, nodes))
    drawn = random.Random(nodes).sample(range(2, (nodes + 1) // 2), MOST_PEERS // 2 - 1)
    return sorted({1, nodes - 1, *drawn, *(nodes - step for step in drawn)})


def peers_by_rank(nodes: Sequence[Node]) -> dict[int, tuple[Node, ...]]:
    """By rank the nodes to which each node connects: all others, or, of many, its neighbours on a ring and a random sample.

    The sample depends only on the number of nodes. Peers that can't listen are left out.
    """
    steps = _steps(len(nodes))
    peers = {}
    for number, node in enumerate(nodes):
        others = (nodes[(number + step) % len(nodes)] for step in steps)
        peers[node.rank] = tuple(peer for peer in others if peer.port)
    return peers


def connect_to_peers(peers: Sequence[Node], timeout: float = CONNECT_TIMEOUT) -> dict[str, list[str]]:
    """Connect to all peers at once; returns by error the hosts that do not answer."""
    lost: dict[str, list[str]] = {}
    if not peers:
        return lost
    with ThreadPoolExecutor(len(peers)) as pool:
        reaches = pool.map(lambda peer: connect_to(peer.address, peer.port, peer.token, timeout), peers)
        for peer, reach in zip(peers, reaches, strict=True):
            if reach.error:
                lost.setdefault(reach.error, []).append(peer.host)
    return lost


def connection_report(lost: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The failures by host as text; hosts with the same peers and error share a part.

    >>> silent = {"no answer within 5 s": ["h3"]}
    >>> connection_report({"h1": silent, "h2": silent, "h3": {"no route to host": ["h1"]}})
    'from h[1-2] to h3 (no answer within 5 s), from h3 to h1 (no route to host)'
    """
    sources: dict[tuple[str, str], list[str]] = {}
    for source, missed in lost.items():
        for error, hosts in missed.items():
            sources.setdefault((fold_names(hosts), error), []).append(source)
    parts = [
        f"from {fold_names(hosts)} to {targets} ({error})" for (targets, error), hosts in sources.items()
    ]
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more of this kind"]
    return ", ".join(parts)


def worker_ports(options: Options) -> Sequence[int]:
    """The ports that the user allows workers (``worker_port``, or ``port`` without a nanny); ``(0,)``: any.

    A firewall may allow exactly these.

    >>> worker_ports(Options(worker_options={"worker_port": "40000:40002"}))
    range(40000, 40003)
    """
    chosen = options.worker_options.get("worker_port")
    if chosen is None and options.worker_class == "distributed.Worker":
        chosen = options.worker_options.get("port")
    try:
        first, _, last = str(chosen or 0).partition(":")
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    # the worker reports invalid ports itself
    return ports[:MOST_PORTS] if ports and 0 <= ports[0] <= ports[-1] < 1 << 16 else (0,)


def listen_for_peers(address: str, ports: Sequence[int], token: str) -> Listener:
    """Listen on the first free port; raises the OSError of the last one."""
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return Listener(address, port, token)
    return Listener(address, ports[-1], token)
