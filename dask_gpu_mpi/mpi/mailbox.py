"""How the ranks talk to each other: small messages over MPI, and nobody waits in a call that spins.

Every MPI library spins in a blocking call, which takes the core from the imports that the others wait for. So messages are
sent without waiting (`isend`), and looked for between short sleeps (`improbe`). One message kind after the other makes the
protocol; see `dask_gpu_mpi.startup.bringup`. All of it runs on a communicator of our own, so the user's messages never mix with
ours.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import StartupError

from .library import before_finalize
from .local_ranks import allocated_hosts, neighbours
from .signals import undisturbed

if TYPE_CHECKING:
    from dask_gpu_mpi.base.failures import Failure

__all__ = ["Mail", "Mailbox"]

_TAG = 7
#: On the user's own communicator, before there is one of ours: a number that no program uses by chance, below MPI's least bound.
_HERE = 32701
#: The last message of each rank on a communicator that is to be freed.
_BYE = "bye"
#: Seconds for those who are here to name those beside them who are not.
NAMING = 0.5
MOST_NAMED = 8
#: Seconds after which a rank other than 0 reports that it was interrupted.
SECOND_WORD = 0.5
#: Seconds that a rank waits for the last messages when it ends. ``MPI_Finalize``, which follows, would wait longer, and spin.
LAST_MESSAGES_TIMEOUT = 30.0
#: Kind of a rank's last message.
_LAST = "last"


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
        Where this rank runs; told to rank 0 at once, to name those who are missing.
    deadline : float
        ``time.monotonic()`` until which all ranks must have joined.
    limit : str
        What that deadline is called in messages.
    interrupted : callable, optional
        The failure to report instead of waiting for the other ranks any longer; None: there is none.

    Raises
    ------
    DaskGpuMpiError
        Not all ranks joined in time, or `interrupted`; `fatal`.
    """

    def __init__(
        self,
        comm: Any,
        host: str,
        deadline: float,
        *,
        limit: str = "the start-up deadline (startup_timeout)",
        interrupted: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self._limit = limit
        self._interrupted = interrupted
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._self: list[Mail] = []
        self._pending: list[Any] = []
        self._later: list[tuple[int, str, Any]] = []
        #: Last messages that have come: by rank, whether the communicator may be freed.
        self._byes: dict[int, bool] = {}
        self._thread = threading.get_ident()
        self._closed = False
        self._owner = os.getpid()
        #: Host of each rank, complete on rank 0.
        self.hosts: dict[int, str] = {self.rank: host}
        if self.size == 1:
            self._comm = None
            return
        self._comm = self._join(comm, host, deadline)
        #: Ranks whose last message is here.
        self._parted: set[int] = set()
        # Whichever way MPI ends: with Python, after which nothing of it runs any more, or by the script's ``MPI.Finalize()``.
        atexit.register(self.close)
        before_finalize(self.close)

    def _join(self, comm: Any, host: str, deadline: float) -> Any:
        """Duplicate the communicator, which takes all ranks, without waiting in MPI."""
        from mpi4py import MPI

        hosts = self.hosts
        beside: dict[int, tuple[str, str]] = {}
        words = [comm.isend((host, None), dest=0, tag=_HERE)] if self.rank else []
        late = False
        duplicate, request = comm.Idup()
        pause = 0.001
        while True:
            done = request.Test()
            status = MPI.Status()
            while self.rank == 0 and (message := comm.improbe(tag=_HERE, status=status)) is not None:
                where, others = message.recv()
                hosts[status.Get_source()] = where
                beside.update({rank: (where, state) for rank, state in (others or {}).items()})
            if done and (all(word.Test() for word in words) if self.rank else len(hosts) == self.size):
                return duplicate
            now = time.monotonic()
            if (failure := self._interrupted()) is not None:
                time.sleep(
                    SECOND_WORD if self.rank else 0.0
                )  # rank 0 speaks for all, unless it has not been interrupted
                error = failure.error(reported=False)
                error.fatal = True
                raise error
            if now > deadline and not late:
                # Who is missing can't say where it is: those beside it can.
                late = True
                others = neighbours(os.getpid())
                if self.rank:
                    words.append(comm.isend((host, others), dest=0, tag=_HERE))
                else:
                    beside.update({rank: (host, state) for rank, state in others.items()})
            # The others leave the word to rank 0, unless it is the one that is missing.
            if now > deadline + (NAMING + 2.0 if self.rank else NAMING):
                raise self._nobody_there(hosts, beside)
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def _nobody_there(self, hosts: dict[int, str], beside: dict[int, tuple[str, str]]) -> StartupError:
        if self.rank == 0:
            missing = [rank for rank in range(self.size) if rank not in hosts]
            by_host = ", ".join(
                f"{ranks_text(rank for rank in hosts if hosts[rank] == host)} on {host}"
                for host in sorted(set(hosts.values()))
            )
            text = (
                f"{ranks_text(missing)} of {self.size} did not answer within {self._limit}"
                f"{_where(missing, beside)}; here are {by_host}"
            )
        else:
            state = _where(
                [0], {rank: (hosts[self.rank], state) for rank, state in neighbours(os.getpid()).items()}
            )
            text = f"rank 0 of {self.size} did not answer within {self._limit}{state}"
        error = StartupError(
            f"{text}: a missing rank was started but does not run (stopped, swapped out, still importing, or its host is gone)",
            reported=self.rank > 1,
        )
        error.fatal = True
        return error

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Post a message; returns at once."""
        if rank == self.rank:
            self._self.append(Mail(rank, kind, payload))
            return
        self._later.append((rank, kind, payload))
        self._dispatch()

    def send_all(self, kind: str, payload: Any = None, *, to_self: bool = False) -> None:
        """Post the same message to every other rank (and to this one, if asked)."""
        for rank in range(self.size):
            if rank != self.rank or to_self:
                self.send(rank, kind, payload)

    def receive(self) -> list[Mail]:
        """Every message that is here now."""
        from mpi4py import MPI

        mails, self._self = self._self, []
        if self._comm is None or not self._may_call():
            return mails
        self._post()
        status = MPI.Status()
        looks = 0
        # Two looks in vain: the first may only have made the library take in what the second then finds (Open MPI), and the next
        # look may be a tenth of a second away.
        while looks < 2:
            message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_TAG, status=status)
            if message is None:
                looks += 1
                continue
            source = status.Get_source()
            kind, payload = message.recv()
            if kind == _LAST:
                self._parted.add(source)
            elif kind == _BYE:  # for `free`, and it may come before this rank is there
                self._byes[source] = payload
            else:
                mails.append(Mail(source, kind, payload))
        return mails

    def flush(self, timeout: float) -> bool:
        """Let the messages on their way leave; False when some have not after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while self._pending or self._later:
            self._post()
            if self._pending or self._later:
                if time.monotonic() > limit:
                    return False
                time.sleep(0.002)
        return True

    def free(self, timeout: float, patience: float) -> bool:
        """Free the communicator, if all ranks come here within `timeout` seconds after rank 0; False: it stays.

        MPI's call takes all ranks, so rank 0 hears each first, and decides for all; the others wait at most `patience` seconds
        for that. What was on its way has been read by then, since a later communicator may get this one's number.
        """
        if self._comm is None or not self._may_call():
            return False
        others = set(range(1, self.size)) if self.rank == 0 else {0}
        if self.rank != 0:
            self.send(0, _BYE, True)
        limit = time.monotonic() + (timeout if self.rank == 0 else patience)
        while set(self._byes) != others and time.monotonic() < limit:
            self.receive()
            time.sleep(0.002)
        free = set(self._byes) == others and all(self._byes.values())
        if self.rank == 0:
            self.send_all(_BYE, free)
            self.flush(timeout)
        if free:
            comm, self._comm = self._comm, None
            comm.Free()
            atexit.unregister(self.close)
        return free

    def close(self, timeout: float = LAST_MESSAGES_TIMEOUT) -> None:
        """Receive what is still on its way, at the end of this process: MPI libraries complain of what nobody has received.

        Those of one rank come in the order in which they were sent, so behind its last one there are no more. All messages are to
        rank 0 or from it. May be called again.
        """
        if self._comm is None or self._closed or not self._may_call():
            return
        self._closed = True
        from mpi4py import MPI

        if re.match(r"MPICH Version:\s*[1-4]\.", MPI.Get_library_version()):
            # With 4.0.2 (UCX, two nodes, below Slurm) MPI_Finalize then hangs in one job of two; without, in none of six.
            return
        with undisturbed():
            self._exchange_last(timeout)

    def _exchange_last(self, timeout: float) -> None:
        others = set(range(1, self.size)) if self.rank == 0 else {0}
        limit = time.monotonic() + timeout
        if self.rank:
            self.send(0, _LAST)
        while self.receive() or not self._parted >= others:
            if time.monotonic() > limit:
                break
            time.sleep(0.002)
        if self.rank == 0:
            self.send_all(_LAST)
        self.flush(max(0.0, limit - time.monotonic()))

    def _may_call(self) -> bool:
        """Whether MPI allows a call here and now: the script may have finalised it, and not every library allows all threads.

        And none from a process that the script forks: it would take what is sent to this one.
        """
        from mpi4py import MPI

        if os.getpid() != self._owner or MPI.Is_finalized():
            return False
        return threading.get_ident() == self._thread or MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _dispatch(self) -> None:
        """Hand to MPI what waits to be sent, and look back at nothing: a message to each of n ranks must not take n² looks."""
        if self._comm is None or not self._may_call():
            return
        waiting, self._later = self._later, []
        for rank, kind, payload in waiting:
            self._pending.append(self._comm.isend((kind, payload), dest=rank, tag=_TAG))

    def _post(self) -> None:
        if self._comm is None or not self._may_call():
            return
        self._dispatch()
        self._pending = [request for request in self._pending if not request.Test()]


def _where(missing: Sequence[int], beside: Mapping[int, tuple[str, str]]) -> str:
    """What is known of ranks that do not answer, in brackets or after a semicolon."""
    known = [
        f"rank {rank} on {beside[rank][0]} {'is stopped' if beside[rank][1] == 'stopped' else 'runs, but not in MPI'}"
        for rank in missing
        if rank in beside
    ]
    text = (
        f" ({', '.join(known[:MOST_NAMED])}{' and others' if len(known) > MOST_NAMED else ''})"
        if known
        else ""
    )
    allocated = allocated_hosts()
    return text if len(known) == len(missing) or not allocated else f"{text}; the job's hosts are {allocated}"
