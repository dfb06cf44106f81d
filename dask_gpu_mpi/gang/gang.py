"""One gang, as the scheduler keeps it: who has joined, left and died, its first failure, and what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .members import Member
from .rounds import Rounds

__all__ = ["Failure", "Gang", "Kind", "Stage"]


class Stage(Enum):
    """Where a member is."""

    CALLED = "its task has not begun"
    JOINED = "it waits for the others, or runs the function"
    LEFT = "the function has ended"
    SPOILT = "the function has ended, and has left in its process what a later gang can't use if this one has failed"
    DEAD = "its worker is gone"


class Kind:
    """What a failure is, as plain data."""

    RAISED = "raised"
    DIED = "died"
    TIMEOUT = "timeout"
    CLIENT = "client"
    #: No failure: its client has the results.
    CLOSED = "closed"


@dataclass(frozen=True)
class Failure:
    """Why a gang is over."""

    kind: str
    #: What happened, without the member's name.
    text: str
    #: The member that it happened to; None: to all.
    rank: int | None = None
    #: What it raised: parts of Dask's message of an error.
    error: dict[str, Any] | None = None


class Gang:
    """One gang, from the call of its client until its workers are free again; used in the scheduler's event loop alone.

    Parameters
    ----------
    name : str
        Unique.
    client : str
        Dask's id of the client that has called.
    grace : float
        Seconds that members have for their end when the gang is over.

    Attributes
    ----------
    over : asyncio.Future
        Done with the first failure.
    started : asyncio.Future
        Done when all members have joined.
    settled : asyncio.Future
        Done when the workers are free again.
    notes : list of tuple
        What else has happened since the failure: rank and text.
    died : set of int
        The ranks whose workers have died by themselves. After another failure they may be its cause: NCCL and Gloo fail in the
        others before the scheduler misses a worker.
    ends_members : bool
        Whether members that still run are being ended, and no death is by itself any more.
    """

    def __init__(self, name: str, client: str, grace: float) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.client = client
        self.grace = grace
        #: Why it has not got its workers yet.
        self.waits_for = ""
        self.members: Sequence[Member] = ()
        self.stages: list[Stage] = []
        #: Host names of the members that have joined.
        self.hosts: list[str] = []
        self.over: asyncio.Future[Failure] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.notes: list[tuple[int, str]] = []
        self.died: set[int] = set()
        self.ends_members = False
        self._rounds = Rounds(0)
        self._complete: dict[int, asyncio.Future[list[bytes]]] = {}
        self._all_left = asyncio.Event()
        #: Fires where it has not started in time.
        self.start_timer: asyncio.TimerHandle | None = None

    def assign(self, members: Sequence[Member]) -> None:
        """It has its workers."""
        self.members = members
        self.stages = [Stage.CALLED] * len(members)
        self.hosts = [member.worker.node for member in members]
        self._rounds = Rounds(len(members))

    def rank_of(self, address: str) -> int | None:
        """Which member a worker is; None: none."""
        return next((member.rank for member in self.members if member.worker.address == address), None)

    def fail(self, failure: Failure) -> bool:
        """It is over, unless it is already; whether this is the first failure."""
        if self.over.done():
            return False
        self.over.set_result(failure)
        self._look_around()
        return True

    def join(self, rank: int, host: str) -> None:
        """A member is ready to run the function."""
        self.stages[rank] = Stage.JOINED
        self.hosts[rank] = host
        if all(stage is Stage.JOINED for stage in self.stages) and not self.started.done():
            self.started.set_result(None)

    def leave(self, rank: int, *, spoilt: bool = False) -> str | None:
        """The function has ended in a member; returns what others wait for it in, if they do. `spoilt`: see `Stage.SPOILT`."""
        if self.stages[rank] is Stage.JOINED:
            self.stages[rank] = Stage.SPOILT if spoilt else Stage.LEFT
        self._look_around()
        return self._rounds.leave(rank)

    def die(self, rank: int) -> None:
        """A member's worker is gone."""
        self.stages[rank] = Stage.DEAD
        if not self.ends_members:
            self.died.add(rank)
            if self.over.done():
                self.notes.append((rank, "died afterwards, which may be the cause"))
        self._look_around()

    def put(self, number: int, rank: int, operation: str, part: bytes) -> asyncio.Future[list[bytes]]:
        """A member's part of a round; done when all are there. Raises a MismatchError."""
        complete = self._complete.get(number)
        if complete is None:
            complete = self._complete[number] = asyncio.get_running_loop().create_future()
        parts = self._rounds.put(number, rank, operation, part)
        if parts is not None:
            del self._complete[number]
            complete.set_result(parts)
        return complete

    def give_up(self, number: int, rank: int) -> None:
        """A member no longer waits for a round: whoever comes to it later ends the gang."""
        self._rounds.give_up(number, rank)

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round."""
        return self._rounds.missing(number)

    def running(self) -> list[Member]:
        """The members that are inside the function, or wait for its start."""
        return [member for member in self.members if self.stages[member.rank] is Stage.JOINED]

    def to_end(self) -> list[Member]:
        """The members whose processes must end, now that it is over and they have had their time to return."""
        failed = self.over.result().kind != Kind.CLOSED
        stages = (Stage.JOINED, Stage.SPOILT) if failed else (Stage.JOINED,)
        return [member for member in self.members if self.stages[member.rank] in stages]

    def dead(self) -> list[Member]:
        """The members whose workers are gone."""
        return [member for member in self.members if self.stages[member.rank] is Stage.DEAD]

    async def wait_for_end(self, timeout: float) -> None:
        """Wait until no member runs; returns after the timeout in any case."""
        if self.running():
            try:
                await asyncio.wait_for(self._all_left.wait(), timeout)
            except TimeoutError:
                return

    def _look_around(self) -> None:
        if self.over.done() and not self.running():
            self._all_left.set()
