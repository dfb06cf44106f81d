"""The meeting of the ranks, once, at the start: what they need to reach each other, and nothing else, goes over a `World`.

    HELLO    every rank to rank 0, which answers: host, interfaces, public key
    ENTER    rank 0 to every rank: the address of the hub and the job's certificate, sealed for that rank
    ENTERED  every rank to rank 0: its agent is connected to the hub
    CLOSE    rank 0 to every rank: all are, the meeting is over

A rank whose agent can't enter sends FAILED; whatever ends the start, rank 0 sends FAIL to all. Messages after HELLO are sealed.
`job.entering` decides what to send, and handles what `Meeting.receive` returns.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import listed, ranks_text
from dask_gpu_mpi.errors import InputError, Problem, StartupError
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses
from dask_gpu_mpi.startup.messages import COORDINATOR, Kind, Registration

#: The deadline in messages.
DEADLINE = "the start-up timeout (startup_timeout)"
#: The fix if another process sends messages.
FIND_STRANGERS = "find out who else reaches the ports of the MPI library, and keep the job to one node or a separate network"
#: Connections to the hub that wait to be accepted; the system may allow fewer (net.core.somaxconn).
BACKLOG = 4096


def listen(address: str) -> socket.socket:
    """The hub's socket, which listens at a free port of this address; OSError: it can't."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


@dataclass(frozen=True)
class Hello:
    """The first message of a rank to rank 0, which may be sent again after the deadline; and the answer to it."""

    host: str
    #: The sender's public key, for all later messages.
    key: bytes
    boot_id: str = ""
    interfaces: tuple[Interface, ...] = ()
    #: The interface that the user wants on this rank.
    wanted: str | None = None
    #: State of the other ranks of its host (`mpi.neighbours`), after the deadline.
    states: Mapping[int, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """The same for all ranks of a node, and for no other."""
        return self.host + self.boot_id


def addresses_of(ranks: Sequence[Hello | Registration]) -> dict[int, str]:
    """The addresses at which the processes of all ranks, in order, are to listen.

    Raises an InputError: there is no network that all share, or not the chosen one.
    """
    names, machines = [each.host for each in ranks], [each.machine for each in ranks]
    # errors show the names, unless two nodes have the same
    nodes = names if len(set(machines)) == len(set(names)) else machines
    networks = {rank: each.interfaces for rank, each in enumerate(ranks)}
    return dict(choose_addresses(nodes, networks, [each.wanted for each in ranks])[1])


@dataclass(frozen=True)
class Invitation:
    """The hub, and what its visitors show."""

    address: str
    port: int
    #: Dask configuration with the job's certificate and key.
    config: dict[str, Any] = field(repr=False)


_PAYLOADS: Mapping[str, Any] = {
    Kind.ENTER: Invitation,
    Kind.ENTERED: None,
    Kind.FAILED: Failure,
    Kind.FAIL: tuple[Failure, bool],
    Kind.CLOSE: None,
}


class Meeting:
    """The messages of one rank in the meeting; all go to rank 0 or come from it.

    `hello` has this rank's facts, without its key.
    """

    def __init__(self, world: World, hello: Hello) -> None:
        self.world = world
        self._keys = KeyPair() if world.size > 1 else None
        self._hello = hello
        #: What is known of each rank that has come, complete on rank 0.
        self.here: dict[int, Hello] = {world.rank: hello}
        #: Host and state of ranks after the deadline, as other ranks of their host report them.
        self._beside: dict[int, tuple[str, str]] = {}
        self._channels: dict[int, Channel] = {}
        self._dropped = 0
        self.open = world.size > 1
        if not self.open:
            world.leave()  # nobody else comes, and MPI ends while the cluster starts
        elif world.rank != COORDINATOR:
            self._send_hello(COORDINATOR)

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that has come."""
        return {rank: hello.host for rank, hello in self.here.items()}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come: on rank 0 of all, elsewhere rank 0."""
        if self.world.rank != COORDINATOR:
            return [] if self._channels or self.world.size == 1 else [COORDINATOR]
        return [rank for rank in range(self.world.size) if rank not in self.here]

    def _send_hello(self, rank: int, states: Mapping[int, str] | None = None) -> None:
        assert self._keys is not None  # there are other ranks
        mine = self._hello
        # only rank 0 needs the networks of others
        facts = (mine.boot_id, mine.interfaces, mine.wanted) if rank == COORDINATOR else ("", (), None)
        self.world.send(rank, pack([Kind.HELLO, Hello(mine.host, self._keys.public, *facts, states or {})]))

    def send(self, rank: int, kind: Kind, payload: Any = None) -> None:
        """Send a sealed message to a rank that has come."""
        if self.open and rank in self._channels:
            self.world.send(rank, pack([kind, self._channels[rank].seal(pack(payload))]))

    def send_all(self, kind: Kind, payload: Any = None) -> None:
        """Send the same message to every rank that has come."""
        for rank in self._channels:
            self.send(rank, kind, payload)

    def report_neighbours(self, states: Mapping[int, str]) -> None:
        """After the deadline: note the state of other ranks of this host; a missing rank can't report itself."""
        self._beside.update({rank: (self._hello.host, state) for rank, state in states.items()})
        if self.world.rank != COORDINATOR:
            self._send_hello(COORDINATOR, states)

    def receive(self) -> list[tuple[int, Kind, Any]]:
        """The messages that have come, with their ranks; HELLO is handled here.

        Raises a `fatal` StartupError if another process sends in the name of a rank.
        """
        found: list[tuple[int, Kind, Any]] = []
        if not self.open:
            return found
        is_first = self.world.rank == COORDINATOR
        for source, data in self.world.receive():
            try:
                if not (0 < source < self.world.size if is_first else source == COORDINATOR):
                    raise ForeignMessageError("from a rank that does not send any")
                kind, payload = from_plain(tuple[str, Any], unpack(data))
                if kind == Kind.HELLO:
                    self._on_hello(source, from_plain(Hello, payload))
                elif kind not in _PAYLOADS or source not in self._channels:
                    raise ForeignMessageError(f"unexpected ({kind[:20]!r})")
                else:
                    opened = self._channels[source].open(from_plain(bytes, payload))
                    found.append((source, Kind(kind), from_plain(_PAYLOADS[kind], unpack(opened))))
            except (PlainDataError, ForeignMessageError) as why:
                self._drop(str(why))
        return found

    def _drop(self, why: str) -> None:
        self._dropped += 1
        if self._dropped == 1:  # one line is enough
            say(
                f"warning: rank {self.world.rank} on {self._hello.host}: a message was dropped that no rank of this job has sent "
                f"({why}). Fix: {FIND_STRANGERS}"
            )

    def _on_hello(self, source: int, hello: Hello) -> None:
        """A rank's key, or its later report. If two keys arrive for one rank, one is forged, and we can't tell which."""
        known = self.here.get(source)
        if known is None:
            assert self._keys is not None  # there are other ranks
            is_first = self.world.rank == COORDINATOR
            number = source if is_first else self.world.rank
            self._channels[source] = self._keys.channel(hello.key, number, to_rank=is_first)
            self.here[source] = hello
            if is_first:
                self._send_hello(source)
        elif known.key != hello.key:
            raise StartupError(
                f"two different keys came from rank {source}: another process sends MPI messages in its name",
                fix=FIND_STRANGERS,
                fatal=True,
            )
        self._beside.update({rank: (hello.host, state) for rank, state in hello.states.items()})

    def open_hub(self) -> socket.socket | None:
        """On rank 0, when all have come: the hub's listening socket, which all ranks can reach; None: there are no others.

        Raises an InputError: there is no network that all share, not the chosen one, or it can't be listened on.
        """
        size = self.world.size
        if size == 1:
            return None
        addresses = addresses_of([self.here[rank] for rank in range(size)])
        try:
            return listen(addresses[COORDINATOR])
        except OSError as error:
            raise InputError(
                f"rank 0 can't listen for the other ranks ({error.strerror})",
                fix="choose another network with interface (--interface)",
            ) from None

    def close(self) -> None:
        """Leave the meeting, when all ranks do so. May be called again."""
        if self.open:
            self.open = False
            self.world.leave()

    def missing_problem(self, allocated: str) -> Problem:
        """The report of the ranks that have not come; `allocated`: the hosts of the job, empty if they are unknown."""
        missing = self.missing
        states = {
            rank: f"on {host} " + ("is stopped" if state == "stopped" else "runs, but has not come")
            for rank, (host, state) in self._beside.items()
            if rank in missing
        }
        text = f"no response from {ranks_text(missing)} of {self.world.size} before {DEADLINE}"
        if states:
            text += f" ({listed([f'rank {rank} {state}' for rank, state in sorted(states.items())])})"
        if allocated and len(states) < len(missing):
            text += f"; the job's nodes are {allocated}"
        if self.world.rank == COORDINATOR:
            hosts = self.hosts
            by_host = [
                f"{ranks_text(rank for rank in hosts if hosts[rank] == host)} on {host}"
                for host in sorted(set(hosts.values()))
            ]
            text += f"; {', '.join(by_host)} responded"
        return Problem(
            text,
            fix="find out why a missing rank, which the launcher started, does not run: it is stopped, swapped out or still "
            "importing, its node is down, or its code does not call initialize(), which all ranks must",
            what="ranks",
            ranks=tuple(missing),
            hosts=tuple(sorted({self._beside[rank][0] for rank in states})),
        )


# Messages between a rank and rank 0 that others can't read, make or repeat.
#
# Anyone who reaches a port of an MPI library can send messages as one of the ranks, and anyone who can read the network can
# read them. So rank 0 and each other rank agree on keys (X25519), and seal their messages (ChaCha20-Poly1305). The first
# messages, with the public keys, are only as safe as MPI: see docs/security-audit.md.

#: Bytes of a public key, and of the key of one direction.
KEY_LENGTH = 32
#: Part of the keys: no other program, nor another version of this one, makes the same keys of the same secret.
_LABEL = b"dask-gpu-mpi messages between ranks, 3"


class ForeignMessageError(Exception):
    """The message is not the next one from the other side of this channel."""


class KeyPair:
    """One rank's keys for one meeting; `public` is for the other side."""

    def __init__(self) -> None:
        # Imported here and below, since it takes 12 ms, and a job of one rank does not need it.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def channel(self, other: bytes, rank: int, *, to_rank: bool) -> Channel:
        """The channel between rank 0 and `rank`.

        `other`: the public key of the other side, or a ForeignMessageError if it is not one. `to_rank`: this side is rank 0.
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
        context = _LABEL + rank.to_bytes(8, "little") + of_rank_0 + of_rank
        keys = HKDF(SHA256(), 2 * KEY_LENGTH, salt=None, info=context).derive(secret)
        down, up = keys[:KEY_LENGTH], keys[KEY_LENGTH:]
        return Channel(down, up) if to_rank else Channel(up, down)


class Channel:
    """One side's keys and counters: only the other side can open its messages, each once and in their order."""

    def __init__(self, own: bytes, others: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._own, self._others = ChaCha20Poly1305(own), ChaCha20Poly1305(others)
        self._sealed = self._opened = 0

    def seal(self, data: bytes) -> bytes:
        """The message to send; messages must be sent in the order in which they were sealed."""
        sealed = self._own.encrypt(_nonce(self._sealed), data, None)
        self._sealed += 1
        return sealed

    def open(self, message: bytes) -> bytes:
        """The content of the next message; a ForeignMessageError if this is another one, or not from the other side."""
        from cryptography.exceptions import InvalidTag

        try:
            data = self._others.decrypt(_nonce(self._opened), message, None)
        except InvalidTag:
            raise ForeignMessageError("not sealed with the job's key, or repeated") from None
        self._opened += 1
        return data


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
