"""The messages by which ranks end the cluster, and how far the end of one rank has come."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.job import outcome


class EndKind(StrEnum):
    """Kinds of messages between ranks from the start of the script until the end, each with sender, receivers and payload.

    >>> EndKind.WORKERS_ENDED == "workers-ended"  # as it is sent
    True
    """

    #: Rank 0 to all: the cluster is over, the script continues. How the cluster was lost; None: it was closed.
    STOP = "stop"
    #: Rank 0 to all: the job ends. The exit code of the script, as far as it is known.
    END = "end"
    #: Rank 0 to the scheduler's rank: all workers have closed, the scheduler may close.
    RELEASE = "release"
    #: Client rank to rank 0, rank 0 to all: the script runs its `finally` after a signal.
    BUSY = "busy"
    #: The scheduler's rank to rank 0, which passes it on to the client rank: the scheduler has had a client.
    CLIENT = "client"
    #: Every rank to rank 0: its own number; its workers have closed.
    CLOSED = "closed"
    #: Any rank to rank 0: ``(final, lost, code)``, the cluster is over. `final`: the script has ended too; `lost`: how the
    #: cluster was lost; `code`: the script's exit code, as far as it is known.
    OVER = "over"
    #: Every rank to rank 0, and (not under MPICH) rank 0 to all, from time to time, if ranks may be lost: its own number.
    ALIVE = "alive"
    #: Any rank to rank 0: ``(rank, failed)``, all its workers have ended by themselves; whether one of them failed.
    WORKERS_ENDED = "workers-ended"
    #: Any rank without the script to rank 0, which passes it on to the client rank: the number of the signal that it was sent.
    SIGNAL = "signal"


#: The type of each kind's payload.
PAYLOADS: Mapping[str, Any] = {
    EndKind.STOP: str | None,
    EndKind.END: int,
    EndKind.RELEASE: None,
    EndKind.BUSY: None,
    EndKind.CLIENT: None,
    EndKind.CLOSED: int,
    EndKind.ALIVE: int,
    EndKind.OVER: tuple[bool, str | None, int],
    EndKind.WORKERS_ENDED: tuple[int, bool],
    EndKind.SIGNAL: int,
}


#: Least seconds between two `ALIVE` of a rank, and the most that come to rank 0 in a second; so with connections to it.
BEAT, BEATS_PER_SECOND = 2.0, 100


def beat_interval(size: int) -> float:
    """Seconds between two `ALIVE` of each of so many ranks."""
    return max(BEAT, size / BEATS_PER_SECOND)


class Ending:
    """How far the end of one rank has come, and why its cluster ends. What has happened stays so."""

    def __init__(self) -> None:
        #: The cluster was over before its script: by ``close()``, ``shutdown()``, or a lost scheduler.
        self.stopped = False
        #: The job ends.
        self.ended = False
        #: This rank has begun to close its part: workers, agent, scheduler.
        self.closed = False
        #: How the cluster was lost, if it was, on the ranks that report it: rank 0 and the client's.
        self.lost: str | None = None
        #: The signal that ends the job, if one does: of a job without a script.
        self.signal: int | None = None
        #: The exit code of the script, as far as it is known.
        self.code = 0

    @property
    def over(self) -> bool:
        """Whether the cluster is over."""
        return self.stopped or self.ended

    def exit_code(self, received: int | None = None) -> int:
        """The exit code of a rank without the script.

        `received`: the first signal that this rank was sent, which counts if the rank leaves by itself.

        >>> Ending().exit_code(15)
        143
        """
        if self.lost is not None:
            return outcome.FAILED
        number = self.signal if self.ended else received
        if number is not None:
            return outcome.code_of_signal(number)
        return 0 if self.ended else outcome.FAILED
