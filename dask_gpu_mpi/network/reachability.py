"""Whether a rank reaches the scheduler's address: a listener there, a connection from every rank, and the clocks compared.

Both sides show a random text that came to them by MPI, so that somebody else's listener is not taken for ours.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import struct
import threading
import time
from dataclasses import dataclass, field

__all__ = ["CONNECT_TIMEOUT", "Listener", "Reach", "Tokens", "connect_only", "connect_to", "port_problem"]

#: Seconds that a rank tries to connect.
CONNECT_TIMEOUT = 5.0
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
    """Listens where the scheduler would, and answers who asks with the right text; in threads of its own.

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
        question, answer = tokens.question.encode(), tokens.answer.encode()

        class Handler(socketserver.StreamRequestHandler):
            timeout = CONNECT_TIMEOUT

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    if hmac.compare_digest(self.rfile.read(len(question)), question):
                        self.wfile.write(answer + _CLOCK.pack(time.time()))

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 4096  # all ranks of a large job come at once

        self._server = Server((address, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def connect_to(address: str, port: int, tokens: Tokens, timeout: float = CONNECT_TIMEOUT) -> Reach:
    """Connect to the listener, and compare clocks.

    Parameters
    ----------
    address, port : str, int
        Where it listens.
    tokens : Tokens
        Of this job.
    timeout : float
        Seconds for each step; all take twice as many at most.
    """
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
        return Reach("something else answers there")
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


def port_problem(address: str, port: int) -> str:
    """Why nobody can listen there now; empty: one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return error.strerror or str(error)
    return ""
