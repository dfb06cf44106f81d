"""The end of a rank, as one state, and the transitions between states.

A state has two parts. The cluster runs, or it is over while the script continues (``close()``, ``shutdown()``, a lost scheduler),
or the whole job ends. And this rank has closed its part (workers, agent, scheduler), or not.

>>> ending = Ending()
>>> ending.on(Cause.STOP)
>>> ending.state
<State.STOPPED: 'the cluster is over, the script continues'>
>>> ending.on(Cause.STOP)
Traceback (most recent call last):
    ...
RuntimeError: STOP in state STOPPED: expected END, CLOSE
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
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


class Cause(Enum):
    """An event that moves a rank towards its end."""

    STOP = "the cluster is over, the script continues"
    END = "the job ends"
    CLOSE = "this rank begins to close its part"


class State(Enum):
    """The state of a rank."""

    RUNNING = "the cluster runs"
    LEFT = "this rank has closed its part by itself: after a signal, or because rank 0 does not respond"
    STOPPED = "the cluster is over, the script continues"
    STOPPED_AND_CLOSED = "the cluster is over, and closed here; the script continues"
    ENDING = "the job ends, and the cluster with it"
    CLOSED = "the job ends, and this rank has closed its part"
    ENDING_AFTER_STOP = "the job ends; its cluster was over before"
    CLOSED_AFTER_STOP = "the job ends; its cluster was over before, and is closed here"

    @property
    def over(self) -> bool:
        """Whether the cluster is over."""
        return self not in (State.RUNNING, State.LEFT)

    @property
    def stopped(self) -> bool:
        """Whether the cluster was over before its script: with ``exit=False`` the other ranks have continued since."""
        return self.over and self not in (State.ENDING, State.CLOSED)

    @property
    def ended(self) -> bool:
        """Whether the job ends."""
        return self.over and self not in (State.STOPPED, State.STOPPED_AND_CLOSED)

    @property
    def closed(self) -> bool:
        """Whether this rank has begun to close its part."""
        return self in CLOSED_STATES


#: A rank closes once; later causes change its next wait, and its exit code.
CLOSED_STATES = (State.LEFT, State.STOPPED_AND_CLOSED, State.CLOSED, State.CLOSED_AFTER_STOP)

#: The next state, by state and cause. Others can't happen: rank 0 decides once that the cluster stops, and once that the job
#: ends, in that order, and messages keep their order.
TRANSITIONS: dict[State, dict[Cause, State]] = {
    State.RUNNING: {Cause.STOP: State.STOPPED, Cause.END: State.ENDING, Cause.CLOSE: State.LEFT},
    State.LEFT: {Cause.STOP: State.STOPPED_AND_CLOSED, Cause.END: State.CLOSED},
    State.STOPPED: {Cause.END: State.ENDING_AFTER_STOP, Cause.CLOSE: State.STOPPED_AND_CLOSED},
    State.STOPPED_AND_CLOSED: {Cause.END: State.CLOSED_AFTER_STOP},
    State.ENDING: {Cause.CLOSE: State.CLOSED},
    State.CLOSED: {},
    State.ENDING_AFTER_STOP: {Cause.CLOSE: State.CLOSED_AFTER_STOP},
    State.CLOSED_AFTER_STOP: {},
}


class Ending:
    """The state of one rank, and why its cluster ends."""

    def __init__(self) -> None:
        self.state = State.RUNNING
        #: How the cluster was lost, if it was, on the ranks that report it: rank 0 and the client's.
        self.lost: str | None = None
        #: The signal that ends the job, if one does: of a job without a script.
        self.signal: int | None = None
        #: The exit code of the script, as far as it is known.
        self.code = 0

    def on(self, event: Cause) -> None:
        """Go to the next state."""
        known = TRANSITIONS[self.state]
        if event not in known:
            expected = ", ".join(each.name for each in known) or "nothing"
            raise RuntimeError(f"{event.name} in state {self.state.name}: expected {expected}")
        self.state = known[event]

    def exit_code(self, received: int | None = None) -> int:
        """The exit code of a rank without the script; `received`: the first signal that it was sent."""
        return outcome.code_of_rank(
            lost=self.lost is not None,
            ended=self.state.ended,
            ended_by=self.signal,
            received=received,
        )
