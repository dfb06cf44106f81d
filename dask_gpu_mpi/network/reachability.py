"""Whether a rank reaches the scheduler's address: a listener there, a connection from every rank, and the clocks compared.

Both sides show a random text that came to them by MPI, so that somebody else's listener is not taken for ours.
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

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.options.model import Options

#: Seconds that a rank tries to connect.
CONNECT_TIMEOUT = 5.0
#: Connections that wait to be accepted: all ranks of a large job come at once.
BACKLOG = 4096
#: Connections that are waited for at the same time; each takes moments. Descriptors are scarce in a rank.
MOST_ASKING = 256
#: Seconds between checks for silent connections, and for the end.
POLL = 0.05
#: Times that a rank asks, where the listener hangs up: it does so on those who wait when strangers come in crowds.
TRIES, PAUSE = 3, 0.1
_OTHER, _SILENT, _RESET = "something else answers there", "no answer", os.strerror(errno.ECONNRESET)
_CLOCK = struct.Struct("!d")


@dataclass(frozen=True)
class Tokens:
    """What the connecting side shows, and what the listener shows in return: as many letters each."""

    question: str = field(default_factory=secrets.token_hex)
    answer: str = field(default_factory=secrets.token_hex)


@dataclass(frozen=True)
class Reach:
    """What a rank found when it connected."""

    #: Why it could not; empty: it could.
    error: str = ""
    #: Seconds that this rank's clock is ahead of the listener's (negative: behind), half the round trip allowed for.
    ahead: float = 0.0
    #: Seconds.
    round_trip: float = 0.0


class Listener:
    """Listens where the scheduler would, and answers who asks with the right text; in a thread of its own.

    Whoever says nothing, or says it slowly, is hung up on after `CONNECT_TIMEOUT`, and before that where too many others wait.

    Parameters
    ----------
    address : str
        IPv4 address.
    port : int
        0: any free one.
    tokens : Tokens
        Of this job.

    Attributes
    ----------
    port : int
        Where it listens.

    Raises
    ------
    OSError
        It can't listen there.
    """

    def __init__(self, address: str, port: int, tokens: Tokens) -> None:
        self._question, self._answer = tokens.question.encode(), tokens.answer.encode()
        self._listening = socket.socket()
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
        #: By connection, oldest first: until when it may ask, and what it has said so far.
        self._asking: dict[socket.socket, tuple[float, bytes]] = {}
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
                    self._hear(cast(socket.socket, key.fileobj))
            self._hang_up_on_silent()
        for connection in list(self._asking):
            self._hang_up(connection)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:  # who asked is gone
            return
        except OSError:  # there are no descriptors
            time.sleep(0.0 if self._make_room() else POLL)
            return
        connection.setblocking(False)
        self._asking[connection] = time.monotonic() + CONNECT_TIMEOUT, b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._asking) > MOST_ASKING:
            self._make_room()

    def _hear(self, connection: socket.socket) -> None:
        if connection not in self._asking:  # hung up on a moment ago
            return
        limit, said = self._asking[connection]
        try:
            piece = connection.recv(len(self._question) - len(said))
            said += piece
            if piece and len(said) < len(self._question):
                self._asking[connection] = limit, said
                return
            if hmac.compare_digest(said, self._question):
                connection.send(
                    self._answer + _CLOCK.pack(time.time())
                )  # fits into the buffer of every socket
        except BlockingIOError:
            return
        except OSError:
            pass
        self._hang_up(connection)

    def _hang_up_on_silent(self) -> None:
        now = time.monotonic()
        for connection, (limit, _) in list(self._asking.items()):
            if limit > now:
                return
            self._hang_up(connection)

    def _make_room(self) -> bool:
        """Hang up on who is waited for longest; False: there is nobody."""
        if oldest := next(iter(self._asking), None):
            self._hang_up(oldest)
        return oldest is not None

    def _hang_up(self, connection: socket.socket) -> None:
        del self._asking[connection]
        self._selector.unregister(connection)
        connection.close()


def connect_to(address: str, port: int, tokens: Tokens, timeout: float = CONNECT_TIMEOUT) -> Reach:
    """Connect to the listener, and compare clocks.

    Parameters
    ----------
    address, port : str, int
        Where it listens.
    tokens : Tokens
        Of this job.
    timeout : float
        Seconds for each step; each of `TRIES` takes twice as many at most.
    """
    reach = _ask(address, port, tokens, timeout)
    for _ in range(TRIES - 1):
        if reach.error not in (_SILENT, _RESET):
            break
        time.sleep(PAUSE)
        again = _ask(address, port, tokens, timeout)
        reach = reach if again.error else again
    return replace(reach, error=_OTHER) if reach.error == _SILENT else reach


def _ask(address: str, port: int, tokens: Tokens, timeout: float) -> Reach:
    wanted = tokens.answer.encode()
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            limit = time.monotonic() + timeout
            sent, started = time.time(), time.monotonic()
            connection.sendall(tokens.question.encode())
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
    """Connect to a listener of somebody else's, and hang up; why that failed, or nothing."""
    try:
        socket.create_connection((address, port), timeout=timeout).close()
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def port_problem(address: str, port: int) -> OSError | None:
    """Why nobody can listen there now; None: one can."""
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        return error
    return None


def is_elsewhere(error: BaseException) -> bool:
    """Whether it was raised since the address to listen at is not one of this node's."""
    return isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL


# Whether the nodes reach each other: which pairs are tested, a listener on each node, and connections from each to others.
#
# Workers of two nodes connect to each other, in both directions, whichever node has the scheduler.

#: Nodes to which each node connects, and which connect to it, at most: a bound on its sockets, and all of them are tried at once.
MOST_AT_START, MOST_IN_CHECK = 16, 64
#: Parts of a report that are spelled out; the others are counted.
MOST_PARTS = 6
#: Ports of a range that are tried.
MOST_PORTS = 1000


@dataclass(frozen=True)
class Node:
    """One node of the job, and where its lowest rank with workers listens."""

    host: str
    rank: int
    #: Where its workers would listen.
    address: str
    #: Of this node alone: another node may have the same address on a network that leads nowhere.
    tokens: Tokens = field(default_factory=Tokens)
    #: 0: it can't listen.
    port: int = 0


@dataclass(frozen=True)
class Lost:
    """A node that did not answer."""

    host: str
    error: str


def _steps(nodes: int, most: int) -> list[int]:
    """How far along a ring of all nodes each node's peers are.

    The same steps for all nodes: so as many connect to each node as it connects to, and each pair is tested in both directions.
    """
    if nodes - 1 <= most:
        return list(range(1, nodes))
    drawn = random.Random(nodes).sample(range(2, (nodes + 1) // 2), most // 2 - 1)
    return sorted({1, nodes - 1, *drawn, *(nodes - step for step in drawn)})


def count_pairs(nodes: int, most: int) -> tuple[int, int]:
    """Pairs of nodes that are tested, and all pairs.

    >>> count_pairs(3, 64), count_pairs(65, 64), count_pairs(1000, 64)
    ((3, 3), (2080, 2080), (32000, 499500))
    """
    return nodes * len(_steps(nodes, most)) // 2, nodes * (nodes - 1) // 2


def peers_by_rank(nodes: Sequence[Node], most: int) -> dict[int, tuple[Node, ...]]:
    """To which nodes each node connects: all others, or, of many, its neighbours on a ring and a random sample.

    Parameters
    ----------
    nodes : sequence of Node
        In an order that is the same for the same job: the sample depends on nothing but their number.
    most : int
        Peers of each node at most; even.

    Returns
    -------
    dict
        By rank; without peers that can't listen.
    """
    steps = _steps(len(nodes), most)
    peers = {}
    for number, node in enumerate(nodes):
        others = (nodes[(number + step) % len(nodes)] for step in steps)
        peers[node.rank] = tuple(peer for peer in others if peer.port)
    return peers


def connect_to_peers(peers: Sequence[Node], timeout: float = CONNECT_TIMEOUT) -> tuple[Lost, ...]:
    """Connect to all peers at once; those that do not answer.

    Parameters
    ----------
    timeout : float
        As `connect_to`.
    """
    if not peers:
        return ()
    with ThreadPoolExecutor(len(peers)) as pool:
        reaches = pool.map(lambda peer: connect_to(peer.address, peer.port, peer.tokens, timeout), peers)
        return tuple(
            Lost(peer.host, reach.error) for peer, reach in zip(peers, reaches, strict=True) if reach.error
        )


def connection_report(lost: Mapping[str, Sequence[Lost]]) -> str:
    """Which nodes, by host, do not reach which; those with the same peers and error share a part.

    >>> silent = [Lost("h3", "no answer within 5 s")]
    >>> connection_report({"h1": silent, "h2": silent, "h3": [Lost("h1", "no route to host")]})
    'from h[1-2] to h3 (no answer within 5 s), from h3 to h1 (no route to host)'
    """
    sources: dict[tuple[str, str], list[str]] = {}
    for source, targets in lost.items():
        for error in dict.fromkeys(one.error for one in targets):
            folded = fold_names(one.host for one in targets if one.error == error)
            sources.setdefault((folded, error), []).append(source)
    parts = [
        f"from {fold_names(hosts)} to {targets} ({error})" for (targets, error), hosts in sources.items()
    ]
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more of this kind"]
    return ", ".join(parts)


def worker_ports(options: Options) -> Sequence[int]:
    """The ports that the user allows workers (``worker_port``, or ``port`` where there is no nanny); ``(0,)``: any.

    A firewall may let exactly these through.

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
    # otherwise the worker's own error is the better one
    return ports[:MOST_PORTS] if ports and 0 <= ports[0] <= ports[-1] < 1 << 16 else (0,)


def listen_for_peers(address: str, ports: Sequence[int], tokens: Tokens) -> Listener:
    """Listen on the first port that is free.

    Raises
    ------
    OSError
        None is.
    """
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return Listener(address, port, tokens)
    return Listener(address, ports[-1], tokens)
