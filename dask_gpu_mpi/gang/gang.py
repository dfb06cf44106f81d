"""The scheduler's record of gangs: leases of workers, ranks, rounds of operations, and the state of one gang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dask.utils import natural_sort_key

from dask_gpu_mpi.base.text import grouped, ranks_text

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState


class Leases:
    """Sets of workers, each leased to one gang at a time, in the order of the requests.

    A gang has all of its workers or none. Only gangs that share no worker with a waiting gang overtake it. So two gangs never
    wait for each other, and none waits forever.

    >>> leases = Leases()
    >>> leases.ask("first", ["a", "b"]), leases.ask("second", ["b", "c"]), leases.ask("third", ["c"])
    (['first'], [], [])
    >>> leases.ask("fourth", ["d"])
    ['fourth']
    >>> leases.release("first")
    ['second']
    """

    def __init__(self) -> None:
        self._wanted: dict[str, frozenset[str]] = {}
        self._granted: set[str] = set()

    def ask(self, gang: str, workers: Iterable[str]) -> list[str]:
        """Request workers for a gang; returns the gangs that get theirs by this: this one, or none."""
        self._wanted[gang] = frozenset(workers)
        return self._grant()

    def release(self, gang: str) -> list[str]:
        """Return a gang's workers, or withdraw its request; returns the gangs that get their workers by this."""
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


@dataclass(frozen=True)
class GangMember:
    """A worker as a member of a gang."""

    rank: int
    worker: WorkerState
    #: Its local_rank, local_size and node_rank, as `Group` has them, and the number of nodes.
    place: dict[str, int]


def choose(wanted: Sequence[str] | None, workers: Iterable[WorkerState]) -> tuple[list[str], list[str]]:
    """The names of the workers that a call requests by name or address, and the requested ones that are missing.

    None requests all workers with a GPU or, if there are none, all workers.

    >>> from types import SimpleNamespace as Worker
    >>> there = [Worker(name=name, address=f"tls://h1:{name}", resources={}) for name in (0, 1)]
    >>> choose(None, there), choose(["tls://h1:1", "7"], there)
    ((['0', '1'], []), (['1'], ['7']))
    """
    workers = list(workers)
    if wanted is None:
        with_gpu = [str(worker.name) for worker in workers if "GPU" in worker.resources]
        return with_gpu or [str(worker.name) for worker in workers], []
    known = {way: str(worker.name) for worker in workers for way in (str(worker.name), worker.address)}
    names = dict.fromkeys(known[name] for name in wanted if name in known)
    return list(names), [name for name in wanted if name not in known]


def rank_members(workers: Iterable[WorkerState]) -> list[GangMember]:
    """Rank workers node by node, in the order of the first name on each, and by name within a node.

    >>> names = {"0-1": "h2", "0-0": "h2", "10-0": "h1", "2-0": "h3"}
    >>> from types import SimpleNamespace as Worker
    >>> members = rank_members(Worker(name=name, host=host) for name, host in names.items())
    >>> [(member.worker.name, member.place["local_rank"], member.place["node_rank"]) for member in members]
    [('0-0', 0, 0), ('0-1', 1, 0), ('2-0', 0, 1), ('10-0', 0, 2)]
    """
    ordered = sorted(workers, key=lambda worker: natural_sort_key(str(worker.name)))
    nodes = grouped(ordered, lambda worker: worker.host)
    members: list[GangMember] = []
    for node_rank, there in enumerate(nodes):
        for local_rank, worker in enumerate(there):
            place = {
                "local_rank": local_rank,
                "local_size": len(there),
                "node_rank": node_rank,
                "nodes": len(nodes),
            }
            members.append(GangMember(len(members), worker, place))
    return members


class MismatchError(ValueError):
    """Members of a gang call different operations."""


class Rounds:
    """The collective operations of a gang of `size` members: each is a round to which every member sends its part.

    The first call of each member belongs to round 0, the second to round 1, and so on.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: Rounds that have begun: the operation, the first rank, the parts by rank, and what is done when all are there.
        self._open: dict[int, tuple[str, int, dict[int, bytes], asyncio.Future[list[bytes]]]] = {}
        #: The first round in which a rank has stopped waiting, and that rank.
        self._given_up: tuple[int, int] | None = None
        #: The ranks whose function has returned, and which take part in no further round.
        self._left: set[int] = set()

    def put(self, number: int, rank: int, operation: str, part: bytes) -> asyncio.Future[list[bytes]]:
        """Add a member's part to a round; the result, when the last one has ended the round, is all parts in rank order.

        Raises a MismatchError if another member has called another operation in this round, has returned, or has stopped waiting
        (its next call would meet this one). The text describes the call of this member.
        """
        if self._given_up is not None and number >= self._given_up[0]:
            raise MismatchError(
                f"calls {operation} when rank {self._given_up[1]} has stopped waiting (expected a longer timeout)"
            )
        if number not in self._open:
            self._open[number] = (operation, rank, {}, asyncio.get_running_loop().create_future())
        first, by, parts, complete = self._open[number]
        if first != operation:
            raise MismatchError(
                f"calls {operation} where rank {by} calls {first} (expected the same calls in the same order on all ranks)"
            )
        if gone := sorted(self._left.difference(parts)):
            raise MismatchError(
                f"calls {operation} after {ranks_text(gone)} returned (expected the same calls on all ranks)"
            )
        parts[rank] = part
        if len(parts) == self._size:
            del self._open[number]
            complete.set_result([parts[rank] for rank in range(self._size)])
        return complete

    def give_up(self, number: int, rank: int) -> None:
        """A member stops waiting for this round: a member that calls it later gets a MismatchError."""
        if self._given_up is None:
            self._given_up = (number, rank)

    def leave(self, rank: int) -> str | None:
        """A member has returned; the error if others wait for it in a round."""
        self._left.add(rank)
        for operation, _, parts, _ in self._open.values():
            if rank not in parts:
                return f"returned while {ranks_text(sorted(parts))} waited in {operation} (expected the same calls on all ranks)"
        return None

    def missing(self, number: int) -> list[int]:
        """The ranks that have not sent their part of a round that has begun."""
        parts = self._open[number][2] if number in self._open else {}
        return [rank for rank in range(self._size) if rank not in parts]


class MemberStage(Enum):
    """The stage of a member."""

    CALLED = "its task has not begun"
    JOINED = "it waits for the others, or runs the function"
    LEFT = "the function has ended"
    SPOILT = (
        "the function has ended, and its process is in a state that a later gang can't use if this one fails"
    )
    DEAD = "its worker is gone"


@dataclass(frozen=True)
class GangEnd:
    """The reason why a gang is over: its first failure, or that its client has the results."""

    #: Without the member's name.
    text: str
    #: The member that has failed; None: all.
    rank: int | None = None
    #: Its exception, by `packed`.
    error: bytes | None = None
    #: Whether a timeout has passed.
    late: bool = False
    #: Whether its client has closed it.
    closed: bool = False


class Gang:
    """One gang, from the call of its client until its workers are free again; used only in the scheduler's event loop.

    `client` is Dask's id of the client, and `grace` the seconds that members have for their end when the gang is over.
    """

    def __init__(self, name: str, client: str, grace: float) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.client = client
        self.grace = grace
        #: The reason why it has no workers yet.
        self.waits_for = ""
        #: Whether that is a worker that is not there.
        self.misses_workers = False
        #: Set when its workers are leased.
        self.granted = asyncio.Event()
        self.members: Sequence[GangMember] = ()
        self.stages: list[MemberStage] = []
        #: Host names of the members that have joined.
        self.hosts: list[str] = []
        #: Done when all members have joined.
        self.started: asyncio.Future[None] = loop.create_future()
        #: Done with the first failure, or by its client.
        self.over: asyncio.Future[GangEnd] = loop.create_future()
        #: Done when the workers are free again.
        self.settled: asyncio.Future[None] = loop.create_future()
        #: Events after the failure, as rank and text.
        self.notes: list[tuple[int, str]] = []
        #: The ranks whose workers have died by themselves. After another failure they may be its cause: NCCL and Gloo fail in the
        #: other members before the scheduler misses a worker.
        self.died: set[int] = set()
        #: Whether members that still run are being ended, so that deaths are expected.
        self.ends_members = False
        self.rounds = Rounds(0)

    def assign(self, members: Sequence[GangMember]) -> None:
        """Give it its workers."""
        self.members = members
        self.stages = [MemberStage.CALLED] * len(members)
        self.hosts = [member.worker.host for member in members]
        self.rounds = Rounds(len(members))

    def on_member(self, rank: int, text: str) -> str:
        """What a text says of a member, with its worker and host."""
        return f"rank {rank} (worker {self.members[rank].worker.name} on {self.hosts[rank]}) {text}"

    def join(self, rank: int, host: str) -> None:
        """A member is ready to run the function."""
        self.stages[rank] = MemberStage.JOINED
        self.hosts[rank] = host
        if all(stage is MemberStage.JOINED for stage in self.stages) and not self.started.done():
            self.started.set_result(None)

    def leave(self, rank: int, *, spoilt: bool = False) -> str | None:
        """The function has ended in a member; returns the error if others wait for it in a round."""
        if self.stages[rank] is MemberStage.JOINED:
            self.stages[rank] = MemberStage.SPOILT if spoilt else MemberStage.LEFT
        return self.rounds.leave(rank)

    def die(self, rank: int) -> None:
        """A member's worker is gone."""
        self.stages[rank] = MemberStage.DEAD
        if not self.ends_members:
            self.died.add(rank)
            if self.over.done():
                self.notes.append((rank, "died afterwards, which may be the cause"))

    def at(self, *stages: MemberStage) -> list[GangMember]:
        """The members at one of these stages."""
        return [member for member in self.members if self.stages[member.rank] in stages]

    def to_end(self) -> list[GangMember]:
        """The members whose processes must end, now that it is over and they have had the time to return."""
        if self.over.result().closed:
            return self.at(MemberStage.JOINED)
        return self.at(MemberStage.JOINED, MemberStage.SPOILT)
