"""The kinds of messages that ranks send each other from the moment the cluster is up until the end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = ["PAYLOADS", "EndKind"]


class EndKind(StrEnum):
    """Kinds of messages; each names its sender, its receivers and its payload.

    >>> EndKind.WORKERS_ENDED == "workers-ended"  # as it is sent
    True
    """

    #: Rank 0 to all: the cluster is over, the script continues. How the cluster was lost; None: it was closed.
    STOP = "stop"
    #: Rank 0 to all: the job ends. What the script has exited with, as far as that is known.
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
    #: Any rank to rank 0: ``(rank, failed)``, all its workers have ended by themselves; whether one of them failed.
    WORKERS_ENDED = "workers-ended"
    #: Any rank without the script to rank 0, which passes it on to the client rank: the number of the signal that it was sent.
    SIGNAL = "signal"


#: The type of what each kind carries.
PAYLOADS: Mapping[str, Any] = {
    EndKind.STOP: str | None,
    EndKind.END: int,
    EndKind.RELEASE: None,
    EndKind.BUSY: None,
    EndKind.CLIENT: None,
    EndKind.CLOSED: int,
    EndKind.OVER: tuple[bool, str | None, int],
    EndKind.WORKERS_ENDED: tuple[int, bool],
    EndKind.SIGNAL: int,
}
