"""Small messages between ranks over MPI, without calls that spin.

In a blocking call, every MPI library spins, and keeps a core busy that imports need. So messages are sent without waiting, and
polled for between short sleeps (`wire`). The order of the kinds of messages is the protocol; see
`dask_gpu_mpi.startup.bringup`. All of it uses a private communicator, so the user's messages never mix with these.

All messages go to rank 0 or come from it. Each is plain data of the type of its kind (`base.plain_data`), sealed for the other
side (`wire`). Messages of other senders are dropped and counted, and never end the job.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.signals import undisturbed
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeouts import ANSWER_TIMEOUT, FAILED_GRACE, FAILED_TIMEOUT, LAST_MESSAGES_TIMEOUT
from dask_gpu_mpi.mpi.finalize import do_not_finalize, is_mpich_before_5
from dask_gpu_mpi.mpi.library import abort, before_finalize
from dask_gpu_mpi.mpi.rendezvous import DEADLINE, Rendezvous
from dask_gpu_mpi.mpi.wire import Channel, DroppedMessages, ForeignMessageError, Wire

if TYPE_CHECKING:
    from dask_gpu_mpi.base.failures import Failure

_TAG = 7
#: Kinds of messages that all ranks exchange, each once. Every rank sends rank 0 whether it agrees; rank 0 answers whether all do.
#: The first is about freeing the communicator, if the program continues. The second, that the process ends, is a rank's last.
_FREE, _LAST = "free", "last"


class Event(NamedTuple):
    """A message of a rank, or an answer of this rank's agent (`startup.messages.Channels`)."""

    #: The rank that sent it; None: this rank's own agent.
    source: int | None
    kind: str
    #: Of an agent, a list.
    payload: Any


class Mailbox:
    """The messages of one rank, which meets the others when it is made.

    `comm` is duplicated, without blocking, and not itself used for messages. All ranks must have come by `deadline`
    (``time.monotonic()``; `deadline_name` in messages), unless `interrupted` returns a failure to report instead. Both raise a
    `fatal` DaskGpuMpiError, and so does another process that sends in the name of a rank. `payloads`: the type of each kind's
    payload.
    """

    def __init__(
        self,
        comm: Any,
        host: str,
        deadline: float,
        payloads: Mapping[str, Any],
        *,
        deadline_name: str = DEADLINE,
        interrupted: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        #: Host of each rank, complete on rank 0.
        self.hosts: dict[int, str] = {self.rank: host}
        #: Messages of this rank to itself.
        self._self: list[Event] = []
        #: Messages that are not handed to MPI yet, with their rank.
        self._later: list[tuple[int, bytes]] = []
        self._payloads = {**payloads, _FREE: bool, _LAST: bool}
        self._drops = DroppedMessages(f"rank {self.rank} on {host}")
        #: The messages of `_FREE` and `_LAST` that have come, by kind and rank.
        self._exchanged: dict[str, dict[int, bool]] = {_FREE: {}, _LAST: {}}
        #: The kinds of these that this rank has sent.
        self._has_sent: set[str] = set()
        #: Called at the end of this process: its exit code, if it has failed and the other ranks may wait for it in MPI; None:
        #: this rank waits for the others.
        self.failure: Callable[[], int | None] = lambda: None
        #: Lost ranks: nothing is sent to them or expected of them, until a message comes from them.
        self.lost: set[int] = set()
        #: Whether ranks may be lost: MPI is finalized only if all have come to their end.
        self.tolerates_loss = False
        #: On rank 0, unless programs continue: called with the ranks whose last message has not come after so many seconds, or
        #: `close`'s timeout if that is longer. MPI would wait for them forever.
        self.on_silent: Callable[[set[int]], object] | None = None
        self.patience = 0.0
        self._closed = False
        self._thread = threading.get_ident()
        self._owner = os.getpid()
        #: Held while messages are sealed and handed to MPI, in one order: the monitor may still run when the script ends.
        self._sending = threading.RLock()
        #: None: there are no other ranks, or it is freed.
        self._comm: Any = None
        self._wire: Wire | None = None
        #: That of the first messages, on the caller's communicator.
        self._first_wire: Wire | None = None
        self._channels: dict[int, Channel] = {}
        if self.size == 1:
            return
        rendezvous = Rendezvous(comm, host, deadline, deadline_name, interrupted, self._drops)
        self._comm = rendezvous.duplicate()
        self._first_wire = rendezvous.wire
        self._wire = Wire(self._comm, _TAG, self._drops)
        self._channels = rendezvous.channels
        self.hosts = rendezvous.hosts
        # MPI ends in one of two ways: when Python ends, or by the script's ``MPI.Finalize()``.
        atexit.register(self.close)
        before_finalize(self.close)

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Post a message; returns at once. PlainDataError: there is no such kind, or the payload is not of its type."""
        if rank == self.rank:
            self._payload_type(kind)
            self._self.append(Event(rank, kind, payload))
            return
        self._dispatch((rank, self._encode(kind, payload)))

    def send_all(self, kind: str, payload: Any = None) -> None:
        """Post the same message to every other rank."""
        if self.size > 1:
            data = self._encode(kind, payload)
            self._dispatch(*((rank, data) for rank in range(self.size) if rank != self.rank))

    def receive(self) -> list[Event]:
        """Every message that is here now."""
        mails, self._self = self._self, []
        if self._wire is None or not self._may_call():
            return mails
        self._post()
        for source, data in self._wire.receive():
            self.lost.discard(source)
            for mail in self._open(source, data):
                if mail.kind in self._exchanged:
                    # For `free` or `close`, which this rank may call later.
                    self._exchanged[mail.kind][source] = mail.payload
                else:
                    mails.append(mail)
        self._drops.report()
        return mails

    def flush(self, timeout: float) -> bool:
        """Wait until all messages have left; False if some have not after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while not self._post():
            if time.monotonic() > limit:
                return False
            time.sleep(0.002)
        return True

    def give_up_sending(self) -> None:
        """Stop waiting for messages that have not left yet: they are for lost ranks."""
        if self._wire is not None:
            self._wire.give_up_sending()

    def free(self, timeout: float, patience: float, *, agrees: bool) -> None:
        """Free the communicator, if all ranks come here within `timeout` seconds after rank 0, and agree; else it stays.

        MPI's call needs all ranks, so each sends its answer to rank 0, which decides for all; the others wait at most `patience`
        seconds for that. All messages have been read by then, since a later communicator may get this one's number. A rank that
        ends instead (`close`) does not agree. All have one answer: a second call does nothing.
        """
        if self._may_call() and self._exchange(_FREE, timeout if self.rank == 0 else patience, agrees=agrees):
            comm, self._comm = self._comm, None
            comm.Free()
            atexit.unregister(self.close)

    def close(self, timeout: float = LAST_MESSAGES_TIMEOUT) -> None:
        """Receive the last messages at the end of this process: MPI libraries print warnings of messages that are left.

        Aborts the job if this rank has failed (`failure`) and the others do not end as well. May be called again.
        """
        if self._closed or not self._may_call():
            return
        self._closed = True
        from mpi4py import MPI

        code = self.failure()
        with undisturbed():
            ended = False
            # With MPICH 4.0.2 (UCX, two nodes, below Slurm) MPI_Finalize hangs in one job of two if ranks wait for each
            # other's last messages; without, in none of six.
            if not is_mpich_before_5(MPI.Get_library_version()):
                # for the ranks that wait in `free`
                self._exchange(_FREE, 0.0, agrees=False)
                patience = max(timeout, self.patience) if code is None else FAILED_TIMEOUT
                ended = self._exchange(_LAST, patience, agrees=not self.lost)
                silent = set(range(1, self.size)) - self.lost - self._exchanged[_LAST].keys()
                if silent and code is None and self.on_silent is not None:
                    self.on_silent(silent)
                if self.tolerates_loss and not ended:
                    do_not_finalize()
            if code is not None and not ended:
                time.sleep(FAILED_GRACE if self.rank else 0.0)
                say(
                    f"error: rank {self.rank} of {self.size} has failed (exit code {code}), and other ranks have not ended; "
                    "aborting the job. Fix: catch the exception on that rank, if all are to continue"
                )
                abort(code)

    def _exchange(self, kind: str, timeout: float, *, agrees: bool) -> bool:
        """Send this rank's message of that kind, and wait for the answer; returns whether all ranks have come, and agree.

        Messages of one rank come in the order in which they were sent, so after its last one there are no more. Rank 0 answers
        when it has those of all, or at its timeout.
        """
        if kind in self._has_sent:
            return False
        self._has_sent.add(kind)
        limit = time.monotonic() + timeout
        if self.rank == 0:
            all_agree = self._agree(kind, set(range(1, self.size)) - self.lost, limit) and agrees
            self.send_all(kind, all_agree)
        else:
            self.send(0, kind, agrees)
            all_agree = self._agree(kind, (0,), limit) and agrees
        self.flush(max(ANSWER_TIMEOUT, limit - time.monotonic()))
        return all_agree

    def _agree(self, kind: str, ranks: Iterable[int], limit: float) -> bool:
        """Wait until `limit` for the messages of that kind of these ranks; returns whether all have come, and agree."""
        come, awaited = self._exchanged[kind], set(ranks)
        while not come.keys() >= awaited and time.monotonic() < limit:
            self.receive()
            time.sleep(0.002)
        if not come.keys() >= awaited:
            return False
        if self._first_wire is not None:
            # A rank that met the others after the deadline has sent rank 0 more than its key.
            self._first_wire.receive()
        return all(come.values())

    def _may_call(self) -> bool:
        """Whether there are other ranks, and MPI allows a call here and now.

        The script may have finalised MPI, and not every library allows calls from all threads. A process that the script forks
        makes no call: it would receive the messages to this one.
        """
        if self._comm is None or os.getpid() != self._owner:
            return False
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        return threading.get_ident() == self._thread or MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _encode(self, kind: str, payload: Any) -> bytes:
        data = pack([kind, payload])
        self._decode(
            self.rank, data
        )  # a payload of another type is an error here; the receiver would drop it
        return data

    def _payload_type(self, kind: str) -> Any:
        if kind not in self._payloads:
            raise PlainDataError(f"unknown kind {kind!r}")
        return self._payloads[kind]

    def _open(self, source: int, message: bytearray) -> list[Event]:
        """The mails that can be opened with this message; none if no rank of this job sent it, or an earlier one is missing."""
        try:
            if source not in self._channels:
                raise ForeignMessageError("from a rank that does not send any")
            opened = self._channels[source].open(message)
        except ForeignMessageError as why:
            self._drops.add(str(why))
            return []
        mails = []
        for data in opened:
            try:
                mails.append(self._decode(source, data))
            except PlainDataError as why:
                self._drops.add(f"malformed, perhaps of another version of dask_gpu_mpi: {why}")
        return mails

    def _decode(self, source: int, data: bytes) -> Event:
        """A message of a rank of this job; a PlainDataError if that rank has another version of this package."""
        kind, payload = from_plain(tuple[str, Any], unpack(data))
        return Event(source, kind, from_plain(self._payload_type(kind), payload))

    def _dispatch(self, *messages: tuple[int, bytes]) -> None:
        """Hand all waiting messages to MPI. They are sealed here, in the order in which they are received."""
        with self._sending:
            self._later += messages
            if self._wire is None or not self._may_call():
                return
            waiting, self._later = self._later, []
            for rank, data in waiting:
                if rank not in self.lost:
                    self._wire.send(rank, self._channels[rank].seal(data))

    def _post(self) -> bool:
        """Hand messages to MPI, and return whether all have left."""
        if self._wire is None:
            return True
        if not self._may_call():
            return not self._later and not self._wire.leaving
        self._dispatch()
        with self._sending:
            return self._wire.has_sent()
