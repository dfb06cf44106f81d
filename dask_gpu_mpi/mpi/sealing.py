"""Messages between a rank and rank 0 that nobody else can read, make or repeat.

Whoever reaches a port of an MPI library can send the job messages as one of its ranks, and whoever sees the network reads them.
So rank 0 and each other rank agree on keys (X25519), which live as long as their communicator, and seal what they send
(ChaCha20-Poly1305). The first messages, with the public keys, are as safe as MPI: see docs/security.md.
"""

from __future__ import annotations

import struct

__all__ = ["KEY_LENGTH", "Channel", "ForeignMessageError", "KeyPair"]

#: Bytes of a public key, and of the key of one direction.
KEY_LENGTH = 32
#: What else the keys are made of: no other program, nor another version of this, makes the same of the same secret.
_LABEL = b"dask-gpu-mpi messages between ranks, 1"
#: Begins each message: how many its sender has sent before it.
_NUMBER = struct.Struct("<Q")


class ForeignMessageError(Exception):
    """Not from the other side of this channel, or not for the first time."""


class KeyPair:
    """One rank's keys for one communicator.

    Attributes
    ----------
    public : bytes
        What the other side is to be sent.
    """

    def __init__(self) -> None:
        # Here and below: it takes ranks 12 ms, which a job of one rank does without.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def channel(self, other: bytes, rank: int, *, to_rank: bool) -> Channel:
        """The channel between rank 0 and `rank`.

        Parameters
        ----------
        other : bytes
            The public key of the other side.
        rank : int
            The one that is not rank 0.
        to_rank : bool
            Whether this side is rank 0.

        Raises
        ------
        ForeignMessageError
            That is no public key.

        Notes
        -----
        HKDF-SHA-256 (RFC 5869) over the secret and both public keys gives one key for each direction.
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
    """One side's keys and counters: what it seals, only the other side opens, each message once and in order."""

    def __init__(self, own: bytes, others: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._own, self._others = ChaCha20Poly1305(own), ChaCha20Poly1305(others)
        self._sent = 0
        #: The number of the next message to hand out, and those that have come before it: a large one takes longer.
        self._next = 0
        self._early: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return "Channel()"

    def seal(self, data: bytes) -> bytes:
        """The message to send; messages must be sent in the order in which they were sealed."""
        number = self._sent
        self._sent += 1
        return _NUMBER.pack(number) + self._own.encrypt(_nonce(number), data, None)

    def open(self, message: bytes | bytearray) -> list[bytes]:
        """What this message carries, and those after it that came first; nothing, while one before it is missing.

        Raises
        ------
        ForeignMessageError
            The other side has not sent it, or it has come before.
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
