"""The channels of a rank, to the other ranks and to its agent, as one stream of events."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer, Order
from dask_gpu_mpi.mpi.mailbox import Mailbox

from .messages import COORDINATOR, Kind

__all__ = ["POLL_BUSY", "POLL_IDLE", "Channels", "Event"]

#: Seconds between polls: while something is under way, and otherwise (0.6 % of a core at most).
POLL_BUSY, POLL_IDLE = 0.01, 0.1


class Event(NamedTuple):
    """A message of a rank, or an answer of this rank's agent."""

    #: The rank that sent it; None: this rank's own agent.
    source: int | None
    #: What it is: `messages.Kind` between ranks.
    kind: str
    #: What comes with it; of an agent, a list.
    payload: Any


class Channels:
    """The mailbox of a rank and the control pipe of its agent."""

    def __init__(self, mailbox: Mailbox, agent: AgentProcess | None) -> None:
        self.mailbox = mailbox
        self.agent = agent
        self.rank = mailbox.rank
        self.size = mailbox.size
        #: Scratch of agents that have ended, which could not be removed in time.
        self.left: list[str] = []
        #: What this rank does now.
        self.step = "reading its options"
        self._waiting: list[Event] = []

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Send a message to a rank, also to this one."""
        self.mailbox.send(rank, kind, payload)

    def begin_step(self, step: str) -> None:
        """Send rank 0 what this rank does next, so that a report can say what it was at, should it hang."""
        self.step = step
        self.send(COORDINATOR, Kind.STEP, step)

    def order(self, order: Order, payload: Any = None) -> None:
        """Send an order to this rank's agent, if it has one."""
        if self.agent is not None:
            self.agent.send(order, payload)

    def push_back(self, events: list[Event]) -> None:
        """Put events back for the next reader: `events` returns them first."""
        self._waiting = [*events, *self._waiting]

    def events(self, timeout: float) -> list[Event]:
        """The events since the last call, after waiting at most `timeout` seconds for one.

        An agent that has died is reported once, as `Answer.LOST`, and dropped.
        """
        events, self._waiting = self._waiting, []
        events += [Event(*mail) for mail in self.mailbox.receive()]
        agent = self.agent
        if agent is None:
            if not events:
                time.sleep(timeout)
            return events
        events += [Event(None, kind, payload) for kind, *payload in agent.events(0.0 if events else timeout)]
        if agent.lost:
            events.append(Event(None, Answer.LOST, [agent.exit_text(), agent.taken]))
            self.drop_agent(0.5)
        return events

    def drop_agent(self, timeout: float) -> None:
        """End this rank's agent within `timeout` seconds."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close(timeout)
            if agent.scratch is not None and os.path.exists(agent.scratch):
                self.left.append(agent.scratch)
