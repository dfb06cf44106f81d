"""One gang, as the scheduler keeps it: who has joined, left and died, its first failure, and what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.text import natural

# Which gang has which workers: all that it asks for at once, in the order of asking.


class Leases:
    """Sets of workers, each leased to one gang at a time.

    A gang holds all of its workers or none, and one that waits is passed by those alone that share no worker with it. So two
    gangs never wait for each other, and none waits for ever.

    Examples
    --------
    >>> leases = Leases()
    >>> leases.ask("first", ["a", "b"]), leases.ask("second", ["b", "c"]), leases.ask("third", ["c"])
    (['first'], [], [])
    >>> leases.ask("fourth", ["d"])
    ['fourth']
    >>> leases.release("first")
    ['second']
    """

    def __init__(self) -> None:
        #: In the order of asking.
        self._wanted: dict[str, frozenset[str]] = {}
        self._granted: set[str] = set()

    def ask(self, gang: str, workers: Iterable[str]) -> list[str]:
        """A gang asks for workers; returns the gangs that are granted theirs by this: it, or none."""
        if gang in self._wanted:
            raise ValueError(f"gang {gang} has asked already")
        self._wanted[gang] = frozenset(workers)
        return self._grant()

    def release(self, gang: str) -> list[str]:
        """A gang gives back what it has, or asks no more; returns the gangs that are granted theirs by this."""
        self._wanted.pop(gang, None)
        self._granted.discard(gang)
        return self._grant()

    def _grant(self) -> list[str]:
        taken: set[str] = set()
        new = []
        for gang, workers in self._wanted.items():
            if gang not in self._granted and taken.isdisjoint(workers):
                self._granted.add(gang)
                new.append(gang)
            taken |= workers
        return new


# Which workers make a gang, and their ranks: the workers of a node have neighbouring ranks.


@dataclass(frozen=True)
class Candidate:
    """A worker that is connected."""

    name: str
    address: str
    #: The host of its address.
    node: str
    #: The address of its nanny; None: it has none.
    nanny: str | None = None
    #: Whether it has the resource ``GPU``.
    has_gpu: bool = False


@dataclass(frozen=True)
class Member:
    """A worker as a member of a gang."""

    rank: int
    worker: Candidate
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int


def choose(wanted: Sequence[str] | None, workers: Iterable[Candidate]) -> tuple[list[str], list[str]]:
    """The names of the workers that a call means, and what it names that is not there.

    Parameters
    ----------
    wanted : sequence of str or None
        Names or addresses. None: all workers with a GPU, and where there are none, all workers.

    Examples
    --------
    >>> there = [Candidate("0", "tls://h1:1", "h1"), Candidate("1", "tls://h1:2", "h1")]
    >>> choose(None, there), choose(["tls://h1:2", "7"], there)
    ((['0', '1'], []), (['1'], ['7']))
    """
    workers = list(workers)
    if wanted is None:
        with_gpu = [worker.name for worker in workers if worker.has_gpu]
        return with_gpu or [worker.name for worker in workers], []
    known = {worker.name: worker.name for worker in workers} | {
        worker.address: worker.name for worker in workers
    }
    names = dict.fromkeys(known[name] for name in wanted if name in known)
    return list(names), [name for name in wanted if name not in known]


def rank_members(workers: Iterable[Candidate]) -> list[Member]:
    """Their ranks: node by node, in the order of the first name on each, and by name within a node.

    >>> names = {"0-1": "h2", "0-0": "h2", "10-0": "h1", "2-0": "h3"}
    >>> members = rank_members(Candidate(name, "", node) for name, node in names.items())
    >>> [(member.worker.name, member.local_rank, member.node_rank) for member in members]
    [('0-0', 0, 0), ('0-1', 1, 0), ('2-0', 0, 1), ('10-0', 0, 2)]
    """
    nodes: dict[str, list[Candidate]] = {}
    for worker in sorted(workers, key=lambda worker: natural(worker.name)):
        nodes.setdefault(worker.node, []).append(worker)
    placed = list(_places(nodes))
    return [Member(rank, *place) for rank, place in enumerate(placed)]


def _places(nodes: Mapping[str, Sequence[Candidate]]) -> Iterable[tuple[Candidate, int, int, int, int]]:
    for node_rank, there in enumerate(nodes.values()):
        for local_rank, worker in enumerate(there):
            yield worker, local_rank, len(there), node_rank, len(nodes)


# The collective operations of a gang, as the scheduler sees them: each is a round to which every member brings its part.


class MismatchError(ValueError):
    """Members of a gang call different operations where they have to call the same."""


class Rounds:
    """The rounds of one gang: the first call of each member belongs to round 0, the second to round 1, and so on.

    Parameters
    ----------
    size : int
        Members of the gang.

    Examples
    --------
    >>> rounds = Rounds(2)
    >>> rounds.put(0, 1, "allgather", b"of rank 1")
    >>> rounds.put(0, 0, "allgather", b"of rank 0")
    [b'of rank 0', b'of rank 1']
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: Rounds that have begun: the operation, who brought it first, and each member's part.
        self._open: dict[int, tuple[str, int, dict[int, bytes]]] = {}
        #: The first round in which somebody has stopped waiting, and who.
        self._given_up: tuple[int, int] | None = None
        #: Those whose function has returned: they come to no further round.
        self._left: set[int] = set()

    def put(self, number: int, rank: int, operation: str, part: bytes) -> list[bytes] | None:
        """A member's part of a round; returns all parts in rank order with the last one, which ends the round.

        Raises
        ------
        MismatchError
            Another member has called another operation in this round, has returned, or has stopped waiting: its next call would
            meet this one. The text is what this member has done.
        """
        if self._given_up is not None and number >= self._given_up[0]:
            raise MismatchError(
                f"calls {operation} when rank {self._given_up[1]} has stopped waiting (expected a longer timeout)"
            )
        first, by, parts = self._open.setdefault(number, (operation, rank, {}))
        if first != operation:
            raise MismatchError(
                f"calls {operation} where rank {by} calls {first} (expected the same calls in the same order on all ranks)"
            )
        if gone := sorted(self._left.difference(parts)):
            raise MismatchError(
                f"calls {operation} after {ranks_text(gone)} returned (expected the same calls on all ranks)"
            )
        parts[rank] = part
        if len(parts) < self._size:
            return None
        del self._open[number]
        return [parts[rank] for rank in range(self._size)]

    def give_up(self, number: int, rank: int) -> None:
        """A member no longer waits for this round."""
        if self._given_up is None:
            self._given_up = (number, rank)

    def leave(self, rank: int) -> str | None:
        """A member has returned, and comes to no round any more; what others wait for in vain, if anything."""
        self._left.add(rank)
        for operation, _, parts in self._open.values():
            if rank not in parts:
                return f"returned while {ranks_text(sorted(parts))} waited in {operation} (expected the same calls on all ranks)"
        return None

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round that has begun."""
        parts = self._open[number][2] if number in self._open else {}
        return [rank for rank in range(self._size) if rank not in parts]


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
