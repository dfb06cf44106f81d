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
        #: What MPI has announced, and is still receiving: from whom, its request, and where to.
        self._arriving: list[tuple[int, Any, bytearray]] = []
        #: What is too large is never received: into a smaller buffer Open MPI 5.0 writes beyond its end, where it copies from
        #: process to process, before it says that the message is truncated.
        self._refused: list[Any] = []

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
        received = []
        # Until two polls have found nothing: the first may only have made the library take in what the second then finds (Open
        # MPI), and the next call may be a tenth of a second away.
        while misses < 2:
            message = self._comm.Improbe(source=MPI.ANY_SOURCE, tag=self._tag, status=status)
            if message is None:
                misses += 1
                continue
            size = status.Get_count(MPI.BYTE)
            announced = sum(len(each) for _, _, each in self._arriving)
            # MPI.UNDEFINED, which is negative: more than MPI can count
            if not 0 <= size <= self._largest or announced + size > MOST_ARRIVING:
                self._drops.add("too large")
                self._refused.append(message)
                continue
            # Without waiting: who has announced a message may never send it.
            buffer = bytearray(size)
            request = message.Irecv([buffer, MPI.BYTE])
            if (each := self._test(status.Get_source(), request, buffer)) is not None:
                received.append(each)
        # Last, since each poll lets the library receive more of them.
        arriving, self._arriving = self._arriving, []
        received += [each for arrival in arriving if (each := self._test(*arrival)) is not None]
        return received

    def _test(self, source: int, request: Any, buffer: bytearray) -> tuple[int, bytearray] | None:
        """What has arrived; None: it has not yet, or it is dropped."""
        from mpi4py import MPI

        try:
            arrived = request.Test()
        except MPI.Exception:
            self._drops.add("broken off")
            return None
        if not arrived:
            self._arriving.append((source, request, buffer))
        return (source, buffer) if arrived else None
