"""All ranks meet once, at the start: they duplicate the communicator, exchange keys, and report ranks that do not come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.text import listed, ranks_text
from dask_gpu_mpi.base.timeouts import INTERRUPTED_GRACE, NAME_MISSING, RANK_0_GRACE
from dask_gpu_mpi.errors import StartupError
from dask_gpu_mpi.mpi.launcher_check import neighbours
from dask_gpu_mpi.mpi.wire import FIND_STRANGERS, Channel, DroppedMessages, ForeignMessageError, KeyPair, Wire
from dask_gpu_mpi.sites.batch import allocated_hosts

if TYPE_CHECKING:
    from dask_gpu_mpi.base.failures import Failure

#: The name of the deadline in messages, unless the caller has another one.
DEADLINE = "the start-up timeout (startup_timeout)"
#: Tag on the user's communicator, before there is another: a number that no program uses by chance, below MPI's least bound.
_TAG = 32701
#: Bytes of the largest message: the states of all ranks of a host.
LARGEST = 1 << 16


@dataclass(frozen=True)
class RankKey:
    """The message of a rank to rank 0, at once and again after the deadline; and the answer to the first one."""

    host: str
    #: The sender's public key, for all later messages.
    key: bytes
    #: State of the other ranks of its host (`launcher_check.neighbours`).
    states: Mapping[int, str] = field(default_factory=dict)


class Rendezvous:
    """One duplication of a communicator, which needs all ranks, without waiting in MPI.

    Each rank sends its host to rank 0 at once, so that rank 0 can report the missing ranks. Two different keys of one rank end
    the start: one comes from another sender, which may have been first.

    `comm`: the communicator to duplicate. `host`: that of this rank. `deadline`: ``time.monotonic()`` until which all ranks must
    have come. `deadline_name`: its name in messages. `interrupted` returns the failure to report instead of waiting any longer,
    if there is one. `drops` counts the messages of other senders.
    """

    def __init__(
        self,
        comm: Any,
        host: str,
        deadline: float,
        deadline_name: str,
        interrupted: Callable[[], Failure | None],
        drops: DroppedMessages,
    ) -> None:
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._host = host
        self._deadline = deadline
        self._deadline_name = deadline_name
        self._interrupted = interrupted
        self._drops = drops
        #: For the messages of the meeting.
        self.wire = Wire(comm, _TAG, drops, largest=LARGEST)
        self._keys = KeyPair()
        #: Public key of each rank with which this one has a channel.
        self._known: dict[int, bytes] = {}
        #: The channel to each rank with which this one has exchanged keys: on rank 0 to all others, elsewhere to rank 0.
        self.channels: dict[int, Channel] = {}
        #: Host of each rank that has come, complete on rank 0.
        self.hosts: dict[int, str] = {self._rank: host}
        #: Host and state of ranks after the deadline, as other ranks of their host report them.
        self._beside: dict[int, tuple[str, str]] = {}

    def duplicate(self) -> Any:
        """The new communicator, which returns errors.

        Raises a `fatal` DaskGpuMpiError: not all ranks came in time, another process sends in the name of one, or `interrupted`.
        """
        from mpi4py import MPI

        # A script's communicator may abort if another process sends a message that is too large.
        before = self._comm.Get_errhandler()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            if self._rank:
                self._send_key(0)
            duplicate, request = self._comm.Idup()
            others = 1 if self._rank else self._size - 1
            pause = 0.001
            late = False
            while True:
                done = request.Test()
                for source, data in self.wire.receive():
                    self._on_message(source, data)
                self._drops.report()
                if done and self.wire.has_sent() and len(self.channels) == others:
                    return duplicate
                now = time.monotonic()
                if (failure := self._interrupted()) is not None:
                    if self._rank:
                        time.sleep(INTERRUPTED_GRACE)
                    error = failure.error(reported=False)
                    error.fatal = True
                    raise error
                if now > self._deadline and not late:
                    late = True
                    # of the other ranks of this host: a missing rank can't report itself
                    states = neighbours(os.getpid())
                    self._beside.update({rank: (self._host, state) for rank, state in states.items()})
                    if self._rank:
                        self._send_key(0, states)
                # The others leave the report to rank 0, unless rank 0 itself is missing.
                if now > self._deadline + NAME_MISSING + (RANK_0_GRACE if self._rank else 0.0):
                    raise self._timed_out()
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        finally:
            self._comm.Set_errhandler(before)

    def _send_key(self, rank: int, neighbour_states: Mapping[int, str] | None = None) -> None:
        self.wire.send(rank, pack(RankKey(self._host, self._keys.public, neighbour_states or {})))

    def _on_message(self, source: int, data: bytearray) -> None:
        """A rank's key, or its later report; every other message is from another sender."""
        if not (source == 0 if self._rank else 0 < source < self._size):
            self._drops.add("from a rank that does not send any")
            return
        try:
            sent: RankKey = from_plain(RankKey, unpack(data))
            is_new = self._is_new(source, sent.key)
        except (PlainDataError, ForeignMessageError):
            self._drops.add("not one of the first messages")
            return
        if self._rank == 0:
            if is_new:
                self.hosts[source] = sent.host
                self._send_key(source)
            self._beside.update({rank: (sent.host, state) for rank, state in sent.states.items()})

    def _is_new(self, source: int, key: bytes) -> bool:
        """Make the channel to a rank with its key; False: there is one, with the same key."""
        known = self._known.get(source)
        if known is None:
            number = source if self._rank == 0 else self._rank
            self.channels[source] = self._keys.channel(key, number, to_rank=self._rank == 0)
            self._known[source] = key
        elif known != key:
            raise StartupError(
                f"two different keys came from rank {source}: another process sends MPI messages in its name",
                fix=FIND_STRANGERS,
                fatal=True,
            )
        return known is None

    def _timed_out(self) -> StartupError:
        beside = self._beside
        if self._rank:
            missing = [] if self.channels else [0]
            came: Mapping[int, str] = {}
        else:
            missing = [rank for rank in range(self._size) if rank not in self.hosts]
            came = self.hosts
        # If all have come and MPI still waits, one may have been stopped since.
        missing = missing or [
            rank for rank in range(self._size) if beside.get(rank, ("", ""))[1] == "stopped"
        ]
        if not missing:
            text = (
                f"all ranks responded, but MPI has not duplicated their communicator before {self._deadline_name}. Fix: check "
                "that each node reaches each other over MPI's network, and that no rank is stopped"
            )
        else:
            came = {rank: host for rank, host in came.items() if rank not in missing}
            text = missing_ranks(missing, self._size, self._deadline_name, beside, came, allocated_hosts())
        return StartupError(text, reported=self._rank > 1, fatal=True)


def missing_ranks(
    missing: Sequence[int],
    size: int,
    deadline_name: str,
    beside: Mapping[int, tuple[str, str]],
    came: Mapping[int, str],
    allocated: str,
) -> str:
    """The message about ranks that have not come.

    `missing`, `size`: the missing ranks, and the number of all. `deadline_name`: the name of their deadline. `beside`: host and
    state of ranks, as others of their host report them. `came`: host of each rank that has come; empty: not known.
    `allocated`: the hosts of the job; empty: unknown.

    >>> missing_ranks([1], 3, "the deadline", {1: ("h1", "stopped")}, {0: "h1", 2: "h2"}, "h[1-2]")
    'no response from rank 1 of 3 before the deadline (rank 1 on h1 is stopped); rank 0 on h1, rank 2 on h2 responded. Fix: ...
    """
    known = [
        f"rank {rank} on {beside[rank][0]} {'is stopped' if beside[rank][1] == 'stopped' else 'runs, but not in MPI'}"
        for rank in missing
        if rank in beside
    ]
    text = f"no response from {ranks_text(missing)} of {size} before {deadline_name}"
    if known:
        text += f" ({listed(known)})"
    if allocated and len(known) < len(missing):
        text += f"; the job's nodes are {allocated}"
    if came:
        by_host = [
            f"{ranks_text(rank for rank in came if came[rank] == host)} on {host}"
            for host in sorted(set(came.values()))
        ]
        text += f"; {', '.join(by_host)} responded"
    return (
        f"{text}. Fix: find out why a missing rank, which the launcher started, does not run: it is stopped, swapped out or "
        "still importing, or its node is down"
    )
