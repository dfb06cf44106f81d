"""How the ranks talk to each other: small messages over MPI, and nobody waits in a call that spins.

Every MPI library spins in a blocking call, which takes the core from the imports that the others wait for. So messages are
sent without waiting, and polled for between short sleeps (`wire`). One message kind after the other makes the
protocol; see `dask_gpu_mpi.startup.bringup`. All of it runs on a communicator of our own, so the user's messages never mix with
ours.

All messages are to rank 0 or from it. Each is plain data of the type that its kind has (`base.plain_data`), sealed for the other
side (`sealing`): what somebody else has sent is dropped and counted, and never ends the job.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.mpi.launcher_check import is_mpich_before_5
from dask_gpu_mpi.mpi.library import abort, before_finalize
from dask_gpu_mpi.mpi.rendezvous import DEADLINE, Rendezvous
from dask_gpu_mpi.mpi.signals import undisturbed
from dask_gpu_mpi.mpi.wire import Channel, DroppedMessages, ForeignMessageError, Wire

if TYPE_CHECKING:
    from dask_gpu_mpi.base.failures import Failure

__all__ = ["Mail", "Mailbox"]

_TAG = 7
#: Kinds of messages that all ranks exchange, each once. Every rank sends rank 0 whether it agrees; rank 0 answers whether all do.
#: That the communicator is freed, where the program continues; and that the process ends, a rank's last message.
_FREE, _LAST = "free", "last"
#: Seconds that a rank waits for the last messages when it ends. ``MPI_Finalize``, which follows, would wait longer, and spin.
LAST_MESSAGES_TIMEOUT = 30.0
#: The same for a rank that has failed: the others may be waiting for it in MPI, for ever.
FAILED_TIMEOUT = 5.0
#: Seconds after which a rank other than 0 reports that it has failed: rank 0 has the first word if it has failed as well.
FAILED_GRACE = 0.5
#: Seconds that the answer of rank 0 has to leave, also where a rank has let it wait until its timeout.
ANSWER_TIMEOUT = 1.0


class Mail(NamedTuple):
    """One message: who sent it, what kind it is, and what it carries."""

    source: int
    kind: str
    payload: Any


class Mailbox:
    """The messages of one rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Is duplicated, without blocking; the caller's own is never used for messages.
    host : str
        Where this rank runs; sent to rank 0 at once, to name those who are missing.
    deadline : float
        ``time.monotonic()`` until which all ranks must have come.
    payloads : mapping
        The type of what each kind of message carries.
    deadline_name : str
        What that deadline is called in messages.
    interrupted : callable, optional
        The failure to report instead of waiting for the other ranks any longer; None: there is none.

    Raises
    ------
    DaskGpuMpiError
        Not all ranks came in time, somebody else sends in the name of one, or `interrupted`; `fatal`.
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
        self._self: list[Mail] = []
        #: What is not handed to MPI yet, by rank.
        self._later: list[tuple[int, bytes]] = []
        self._payloads = {**payloads, _FREE: bool, _LAST: bool}
        self._drops = DroppedMessages(f"rank {self.rank} on {host}")
        #: What has come of the messages that all exchange, by kind and rank.
        self._exchanged: dict[str, dict[int, bool]] = {_FREE: {}, _LAST: {}}
        #: Those that this rank has sent.
        self._has_sent: set[str] = set()
        #: Called at the end of this process: its exit code, where it has failed and the other ranks may wait for it in MPI; None:
        #: they are to be waited for.
        self.failure: Callable[[], int | None] = lambda: None
        self._closed = False
        self._thread = threading.get_ident()
        self._owner = os.getpid()
        #: Held while messages are handed to MPI, sealed in that order: the monitor may still be there when the script ends.
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
        # Whichever way MPI ends: with Python, after which nothing of it runs any more, or by the script's ``MPI.Finalize()``.
        atexit.register(self.close)
        before_finalize(self.close)

    @property
    def dropped(self) -> int:
        """How many messages have come that no rank of this job has sent."""
        return self._drops.count

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Post a message; returns at once.

        Raises
        ------
        PlainDataError
            There is no such kind, or the payload is not of its type; a message to this rank itself is not looked into.
        """
        if rank == self.rank:
            self._payload_type(kind)
            self._self.append(Mail(rank, kind, payload))
            return
        self._dispatch((rank, self._encode(kind, payload)))

    def send_all(self, kind: str, payload: Any = None, *, to_self: bool = False) -> None:
        """Post the same message to every other rank (and to this one, if asked)."""
        if to_self:
            self.send(self.rank, kind, payload)
        if self.size > 1:
            data = self._encode(kind, payload)
            self._dispatch(*((rank, data) for rank in range(self.size) if rank != self.rank))

    def receive(self) -> list[Mail]:
        """Every message that is here now."""
        mails, self._self = self._self, []
        if self._wire is None or not self._may_call():
            return mails
        self._post()
        for source, data in self._wire.receive():
            for mail in self._open(source, data):
                if mail.kind in self._exchanged:
                    # For `free` or `close`, and it may come before this rank is there.
                    self._exchanged[mail.kind][source] = mail.payload
                else:
                    mails.append(mail)
        self._drops.report()
        return mails

    def flush(self, timeout: float) -> bool:
        """Let the messages on their way leave; False when some have not after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while not self._post():
            if time.monotonic() > limit:
                return False
            time.sleep(0.002)
        return True

    def free(self, timeout: float, patience: float, *, agrees: bool) -> None:
        """Free the communicator, if all ranks come here within `timeout` seconds after rank 0, and agree; else it stays.

        MPI's call takes all ranks, so rank 0 hears each first, and decides for all; the others wait at most `patience` seconds
        for that. What was on its way has been read by then, since a later communicator may get this one's number. A rank that
        ends instead (`close`) does not agree, and all have one answer: if called again, this does nothing.
        """
        if self._may_call() and self._exchange(_FREE, timeout if self.rank == 0 else patience, agrees=agrees):
            comm, self._comm = self._comm, None
            comm.Free()
            atexit.unregister(self.close)

    def close(self, timeout: float = LAST_MESSAGES_TIMEOUT) -> None:
        """Receive what is still on its way, at the end of this process: MPI libraries complain of what nobody has received.

        Abort the job where this rank has failed (`failure`), and the others do not end as well. May be called again.
        """
        if self._closed or not self._may_call():
            return
        self._closed = True
        from mpi4py import MPI

        code = self.failure()
        with undisturbed():
            ended = False
            # With MPICH 4.0.2 (UCX, two nodes, below Slurm) MPI_Finalize then hangs in one job of two; without, in none of six.
            if not is_mpich_before_5(MPI.Get_library_version()):
                # for the ranks that are in `free`: they wait no longer
                self._exchange(_FREE, 0.0, agrees=False)
                ended = self._exchange(_LAST, timeout if code is None else FAILED_TIMEOUT, agrees=True)
            if code is not None and not ended:
                time.sleep(FAILED_GRACE if self.rank else 0.0)
                say(
                    f"error: rank {self.rank} of {self.size} has failed (exit code {code}), and other ranks have not ended; "
                    "aborting the job. Fix: catch the exception on that rank, if all are to continue"
                )
                abort(code)

    def _exchange(self, kind: str, timeout: float, *, agrees: bool) -> bool:
        """Send this rank's message of that kind, and wait for those to it; whether all ranks have come, and agree.

        All messages are to rank 0 or from it, and those of one rank come in the order in which they were sent: behind its last
        one there are no more. Rank 0 answers when it has those of all, or at its timeout.
        """
        if kind in self._has_sent:
            return False
        self._has_sent.add(kind)
        limit = time.monotonic() + timeout
        others = set(range(1, self.size)) if self.rank == 0 else {0}
        come = self._exchanged[kind]
        if self.rank != 0:
            self.send(0, kind, agrees)
        while not come.keys() >= others and time.monotonic() < limit:
            self.receive()
            time.sleep(0.002)
        complete = come.keys() >= others
        if complete and self._first_wire is not None:
            # A rank that met the others after the deadline has sent rank 0 more than its key.
            self._first_wire.receive()
        all_agree = complete and agrees and all(come.values())
        if self.rank == 0:
            self.send_all(kind, all_agree)
        self.flush(max(ANSWER_TIMEOUT, limit - time.monotonic()))
        return all_agree

    def _may_call(self) -> bool:
        """Whether there is somebody to talk to, and MPI allows a call here and now.

        The script may have finalised it, and not every library allows all threads. And none from a process that the script
        forks: it would take what is sent to this one.
        """
        if self._comm is None or os.getpid() != self._owner:
            return False
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        return threading.get_ident() == self._thread or MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _encode(self, kind: str, payload: Any) -> bytes:
        data = pack([kind, payload])
        self._decode(self.rank, data)  # a payload of another type is refused here instead of lost there
        return data

    def _payload_type(self, kind: str) -> Any:
        if kind not in self._payloads:
            raise PlainDataError(f"unknown kind {kind!r}")
        return self._payloads[kind]

    def _open(self, source: int, message: bytearray) -> list[Mail]:
        """What has come with this message; nothing, where it is not from a rank of this job, or not in its turn."""
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

    def _decode(self, source: int, data: bytes) -> Mail:
        """A message of a rank of this job.

        Raises
        ------
        PlainDataError
            It runs another version of this package.
        """
        kind, payload = from_plain(tuple[str, Any], unpack(data))
        return Mail(source, kind, from_plain(self._payload_type(kind), payload))

    def _dispatch(self, *messages: tuple[int, bytes]) -> None:
        """Hand to MPI what waits to be sent: here it is sealed, since that is the order in which it is received."""
        with self._sending:
            self._later += messages
            if self._wire is None or not self._may_call():
                return
            waiting, self._later = self._later, []
            for rank, data in waiting:
                self._wire.send(rank, self._channels[rank].seal(data))

    def _post(self) -> bool:
        """Let messages leave; whether all have."""
        if self._wire is None:
            return True
        if not self._may_call():
            return not self._later and not self._wire.leaving
        self._dispatch()
        with self._sending:
            return self._wire.has_sent()
