"""Bytes over one tag of a communicator: sent without waiting, received as they come, and not trusted.

Never use mpi4py's methods in lower case, which unpickle messages: anyone who reaches a port of the MPI library could run code.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from dask_gpu_mpi.base.streams import say

# Messages between a rank and rank 0 that others can't read, make or repeat.
#
# Anyone who reaches a port of an MPI library can send messages as one of the ranks, and anyone who can read the network can read
# them. So rank 0 and each other rank agree on keys (X25519), which last as long as their communicator, and seal their messages
# (ChaCha20-Poly1305). The first messages, with the public keys, are only as safe as MPI: see docs/security.md.

#: Bytes of a public key, and of the key of one direction.
KEY_LENGTH = 32
#: Part of the keys: no other program, nor another version of this one, makes the same keys of the same secret.
_LABEL = b"dask-gpu-mpi messages between ranks, 1"
#: The begin of each message: the number of its sender's messages before it.
_NUMBER = struct.Struct("<Q")


class ForeignMessageError(Exception):
    """The message is not from the other side of this channel, or was repeated."""


class KeyPair:
    """One rank's keys for one communicator; `public` is for the other side."""

    def __init__(self) -> None:
        # Imported here and below, since it takes 12 ms, and a job of one rank does not need it.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def channel(self, other: bytes, rank: int, *, to_rank: bool) -> Channel:
        """The channel between rank 0 and `rank`.

        `other`: the public key of the other side, or a ForeignMessageError if it is not one. `rank`: the one that is not rank 0.
        `to_rank`: whether this side is rank 0. HKDF-SHA-256 (RFC 5869) over the secret and both public keys gives one key for
        each direction.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:  # of another length, or one that gives the same secret with every key
            raise ForeignMessageError("no public key") from None
        of_rank_0, of_rank = (self.public, other) if to_rank else (other, self.public)
        context = _LABEL + _NUMBER.pack(rank) + of_rank_0 + of_rank
        keys = HKDF(SHA256(), 2 * KEY_LENGTH, salt=None, info=context).derive(secret)
        down, up = keys[:KEY_LENGTH], keys[KEY_LENGTH:]
        return Channel(down, up) if to_rank else Channel(up, down)


class Channel:
    """One side's keys and counters: only the other side can open its messages, each once and in order."""

    def __init__(self, own: bytes, others: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._own, self._others = ChaCha20Poly1305(own), ChaCha20Poly1305(others)
        self._sent = 0
        #: The number of the next message to return, and later ones that have come before it, since large ones take longer.
        self._next = 0
        self._early: dict[int, bytes] = {}

    def seal(self, data: bytes) -> bytes:
        """The message to send; messages must be sent in the order in which they were sealed."""
        number = self._sent
        self._sent += 1
        return _NUMBER.pack(number) + self._own.encrypt(_nonce(number), data, None)

    def open(self, message: bytes | bytearray) -> list[bytes]:
        """The content of this message, and of later ones that came first; empty while an earlier one is missing.

        Raises a ForeignMessageError if the other side has not sent it, or it was repeated.
        """
        from cryptography.exceptions import InvalidTag

        if len(message) < _NUMBER.size:
            raise ForeignMessageError("too short")
        (number,) = _NUMBER.unpack_from(message)
        if number < self._next or number in self._early:
            raise ForeignMessageError("repeated")
        try:
            data = self._others.decrypt(_nonce(number), bytes(memoryview(message)[_NUMBER.size :]), None)
        except InvalidTag:
            raise ForeignMessageError("not sealed with the job's key") from None
        self._early[number] = data
        opened = []
        while self._next in self._early:
            opened.append(self._early.pop(self._next))
            self._next += 1
        return opened


def _nonce(number: int) -> bytes:
    return b"\0\0\0\0" + _NUMBER.pack(number)


#: Bytes of the largest message.
LARGEST = 64 << 20
#: Bytes of all messages that are arriving at a time, and of those of one rank. The size that a message announces is allocated
#: before the message arrives. Further messages are received later.
MOST_ARRIVING, MOST_OF_A_RANK = 256 << 20, 128 << 20
#: Seconds after which an announced message no longer counts as arriving.
ARRIVAL_TIMEOUT = 30.0
#: Seconds between two warnings of one rank.
WARNING_INTERVAL = 60.0
#: The fix if another process sends messages.
FIND_STRANGERS = "find out who else reaches the ports of the MPI library, and keep the job to one node or a separate network"


#: All wires of this process. A sender may send an announced message at any time, even after the communicator's end, and MPI
#: writes it into the buffer. So buffers that MPI may still use are never freed. This list has a second reference, so that it is
#: not freed either: ``MPI_Finalize`` comes after the end of Python's modules.
_WIRES: list[Wire] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_WIRES))


class DroppedMessages:
    """Counts messages that no rank of this job has sent (`count`), and failed calls of MPI (`errors`).

    Both are reported at most once a minute. `where`: this rank, for the warnings.
    """

    def __init__(self, where: str) -> None:
        self.count = 0
        self.errors = 0
        self._where = where
        #: The warnings that are not printed yet: at most one of each kind.
        self._warnings: dict[str, str] = {}
        self._next_report = 0.0

    def add(self, why: str) -> None:
        """Count a message."""
        self.count += 1
        are = "message was" if self.count == 1 else "messages were"
        self._warnings["dropped"] = (
            f"{self.count} MPI {are} dropped that no rank of this job has sent (the last: {why}). Fix: {FIND_STRANGERS}"
        )

    def add_error(self, what: str, error: Exception) -> None:
        """Count an error, which may have cost a message."""
        self.errors += 1
        calls = "call" if self.errors == 1 else "calls"
        last = f"{what}: {' '.join(str(error).split())}"[:200]
        self._warnings["failed"] = (
            f"{self.errors} MPI {calls} failed (the last: {last}). Fix: check the network between the nodes, and whether all "
            "ranks still run"
        )

    def report(self) -> None:
        """Print the warnings that are due."""
        if self._warnings and time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + WARNING_INTERVAL
            for text in self._warnings.values():
                say(f"warning: {self._where}: {text}")
            self._warnings.clear()


class Wire:
    """The messages of one rank on one communicator.

    `comm`: must return errors, not abort. `tag`: of all messages. `drops`: counts messages that are dropped here. `largest`:
    bytes of the largest message that is received. `leaving`: the requests of messages that MPI still has to send.
    """

    def __init__(self, comm: Any, tag: int, drops: DroppedMessages, *, largest: int = LARGEST) -> None:
        self._comm = comm
        self._tag = tag
        self._drops = drops
        self._largest = largest
        self.leaving: list[Any] = []
        #: Messages that MPI has announced and is receiving: the sender, the request, the buffer, and since when
        #: (``time.monotonic()``).
        self._arriving: list[tuple[int, Any, bytearray, float]] = []
        #: Bytes of arriving messages that are still expected, by rank.
        self._expected: Counter[int] = Counter()
        #: Messages to receive later: the sender, the size, and MPI's handle.
        self._later: list[tuple[int, int, Any]] = []
        #: Messages to lost ranks, and those that are too large: MPI may use these until the end of the process. Messages that are
        #: too large are never received: when Open MPI 5.0 copies from process to process, it writes beyond the end of a smaller
        #: buffer before it reports that the message is truncated.
        self._kept: list[Any] = []
        _WIRES.append(self)

    def send(self, rank: int, data: bytes) -> None:
        """Post a message; returns at once, and tests no request: a message to each of n ranks must not need n² tests."""
        from mpi4py import MPI

        request = self._call("sending", lambda: self._comm.Isend([data, MPI.BYTE], dest=rank, tag=self._tag))
        if request is not None:
            self.leaving.append(request)

    def give_up_sending(self) -> None:
        """Stop waiting for messages that have not left yet: they are for lost ranks."""
        self._kept += self.leaving
        self.leaving = []

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call MPI; None: it has failed.

        That is counted, but a dead rank is acknowledged: a library that survives one repeats that error until then.
        """
        from mpi4py import MPI

        try:
            return function()
        except MPI.Exception as error:
            if "PROC_FAILED" not in str(error):
                self._drops.add_error(what, error)
                return None
            with contextlib.suppress(Exception):
                self._comm.Ack_failed()
            return None

    def has_sent(self) -> bool:
        """Whether all messages have left, or can't."""
        self.leaving = [request for request in self.leaving if not self._has_left(request)]
        return not self.leaving

    def _has_left(self, request: Any) -> bool:
        return self._call("sending", request.Test) is not False

    def receive(self) -> list[tuple[int, bytearray]]:
        """Every message that has arrived, with the rank that sent it according to MPI."""
        from mpi4py import MPI

        if not self._comm:  # it was the caller's, and is freed
            return []
        status = MPI.Status()
        misses = 0
        received = self._arrived()
        later, self._later = self._later, []
        received += [each for message in later if (each := self._take(*message)) is not None]
        # Until two polls have found nothing: during the first, Open MPI may only have received a message that the second then
        # finds, and the next call may be a tenth of a second away.
        while misses < 2:
            message = self._call(
                "probing", lambda: self._comm.Improbe(source=MPI.ANY_SOURCE, tag=self._tag, status=status)
            )
            if message is None:
                misses += 1
                continue
            size = status.Get_count(MPI.BYTE)
            if not 0 <= size <= self._largest:  # MPI.UNDEFINED, which is negative: more than MPI can count
                self._drops.add("too large")
                self._kept.append(message)
            elif (each := self._take(status.Get_source(), size, message)) is not None:
                received.append(each)
        # Once more, since each poll lets the library receive more of them.
        return received + self._arrived()

    def _arrived(self) -> list[tuple[int, bytearray]]:
        """The announced messages that have arrived since."""
        self._expected.clear()
        arriving, self._arriving = self._arriving, []
        return [each for arrival in arriving if (each := self._test(*arrival)) is not None]

    def _take(self, source: int, size: int, message: Any) -> tuple[int, bytearray] | None:
        """Receive a message, without waiting, since its sender may never send it. None: it has not arrived yet."""
        from mpi4py import MPI

        if self._expected[source] + size > MOST_OF_A_RANK or self._expected.total() + size > MOST_ARRIVING:
            self._later.append((source, size, message))
            return None
        buffer = bytearray(size)
        request = self._call("receiving", lambda: message.Irecv([buffer, MPI.BYTE]))
        return None if request is None else self._test(source, request, buffer, time.monotonic())

    def _test(
        self, source: int, request: Any, buffer: bytearray, since: float
    ) -> tuple[int, bytearray] | None:
        """The message, if it has arrived; None: not yet, or it is dropped."""
        from mpi4py import MPI

        try:
            arrived = request.Test()
        except MPI.Exception:
            self._drops.add("broken off")
            return None
        if arrived:
            return source, buffer
        self._arriving.append((source, request, buffer, since))
        if time.monotonic() <= since + ARRIVAL_TIMEOUT:
            self._expected[source] += len(buffer)
        return None
