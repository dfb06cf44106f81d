"""Bytes over one tag of a communicator: sent without waiting, received as they come, and nothing in them is believed.

Never by mpi4py's methods in lower case, which unpickle what arrives: whoever reaches a port of the MPI library could run code.
"""

from __future__ import annotations

import time
from typing import Any

from dask_gpu_mpi.base.streams import say

__all__ = ["LARGEST", "Drops", "Wire"]

#: Bytes of the largest message, and of all that are arriving at a time: what a message claims is allocated before it is here.
LARGEST, MOST_ARRIVING = 64 << 20, 256 << 20
#: Seconds between two warnings of one rank.
WARNING_INTERVAL = 60.0


class Drops:
    """Messages that no rank of this job has sent: counted, and reported at most once a minute.

    Parameters
    ----------
    where : str
        This rank, for the warning.

    Attributes
    ----------
    count : int
        How many there were.
    """

    def __init__(self, where: str) -> None:
        self.count = 0
        self._where = where
        self._why = ""
        self._reported = 0
        self._next_report = 0.0

    def add(self, why: str) -> None:
        """Count one."""
        self.count += 1
        self._why = why

    def report(self) -> None:
        """Print the warning, where it is due."""
        if self.count == self._reported or time.monotonic() < self._next_report:
            return
        self._reported = self.count
        self._next_report = time.monotonic() + WARNING_INTERVAL
        are = "message was" if self.count == 1 else "messages were"
        say(
            f"warning: {self._where}: {self.count} MPI {are} dropped that no rank of this job has sent (the last: {self._why}). "
            "Fix: find out who else reaches the ports of the MPI library, and keep the job to one host or a network of its own"
        )


class Wire:
    """The messages of one rank on one communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Must return errors, not abort.
    tag : int
        Of all messages.
    drops : Drops
        Counts what is dropped here.
    largest : int
        Bytes of the largest message that is taken.

    Attributes
    ----------
    leaving : list
        The requests of what MPI has to send.
    """

    def __init__(self, comm: Any, tag: int, drops: Drops, *, largest: int = LARGEST) -> None:
        self._comm = comm
        self._tag = tag
        self._drops = drops
        self._largest = largest
        self.leaving: list[Any] = []
        #: What MPI has announced, and is still receiving: from whom, its request, and where to, or None: it is dropped.
        self._arriving: list[tuple[int, Any, bytearray | None]] = []

    def send(self, rank: int, data: bytes) -> None:
        """Post a message; returns at once, and tests no request: a message to each of n ranks must not take n² tests."""
        from mpi4py import MPI

        self.leaving.append(self._comm.Isend([data, MPI.BYTE], dest=rank, tag=self._tag))

    def has_sent(self) -> bool:
        """Whether all messages have left."""
        self.leaving = [request for request in self.leaving if not request.Test()]
        return not self.leaving

    def receive(self) -> list[tuple[int, bytearray]]:
        """Every message that is here now, with the rank that has sent it, as far as MPI knows."""
        from mpi4py import MPI

        status = MPI.Status()
        misses = 0
        waiting, self._arriving = self._arriving, []
        received = [each for arrival in waiting if (each := self._test(*arrival)) is not None]
        # Until two polls have found nothing: the first may only have made the library take in what the second then finds (Open
        # MPI), and the next call may be a tenth of a second away.
        while misses < 2:
            message = self._comm.Improbe(source=MPI.ANY_SOURCE, tag=self._tag, status=status)
            if message is None:
                misses += 1
                continue
            begun = self._begin(message, status.Get_count(MPI.BYTE))
            if (each := self._test(status.Get_source(), *begun)) is not None:
                received.append(each)
        return received

    def _begin(self, message: Any, size: int) -> tuple[Any, bytearray | None]:
        """Have MPI receive a message, without waiting: who has announced one may never send it."""
        from mpi4py import MPI

        arriving = sum(len(each) for _, _, each in self._arriving if each is not None)
        # MPI.UNDEFINED, which is negative: more than MPI can count
        if 0 <= size <= self._largest and arriving + size <= MOST_ARRIVING:
            buffer = bytearray(size)
            return message.Irecv([buffer, MPI.BYTE]), buffer
        self._drops.add("too large")
        return message.Irecv([bytearray(), MPI.BYTE]), None

    def _test(self, source: int, request: Any, buffer: bytearray | None) -> tuple[int, bytearray] | None:
        """What has arrived; None: it has not yet, or it is dropped."""
        from mpi4py import MPI

        try:
            arrived = request.Test()
        except MPI.Exception:  # of what is dropped, MPI reports that it does not fit
            if buffer is not None:
                self._drops.add("broken off")
            return None
        if not arrived:
            self._arriving.append((source, request, buffer))
        return (source, buffer) if arrived and buffer is not None else None
