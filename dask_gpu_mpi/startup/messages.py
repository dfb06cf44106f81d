"""The messages of the start between ranks, their types, and the one stream of events in which a rank receives them.

`Channels` joins the messages of other ranks with the answers of this rank's agent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer, Order, SchedulerSettings
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.mpi.mailbox import Event, Mailbox
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, Node, Reach
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.plan.model import Plan, Start

#: Rank that gathers the registrations and makes the plan.
COORDINATOR = 0


class Kind(StrEnum):
    """Kinds of messages between ranks; each names its sender, its receivers and its payload."""

    #: Every rank to the coordinator: the step that it begins, of those that may hang.
    STEP = "step"
    #: Every rank to the coordinator: a `Registration`.
    REGISTRATION = "registration"
    #: Coordinator to the scheduler's rank and to a rank of each node: a `Listen`, for the reachability test.
    LISTEN = "listen"
    #: These to the coordinator: a `Listening`.
    LISTENING = "listening"
    #: Coordinator to all: a `Connect`.
    CONNECT = "connect"
    #: Every rank to the coordinator: the `Reach` of its connections.
    REACHED = "reached"
    #: Coordinator to the scheduler's rank: its `SchedulerSettings`.
    SCHEDULER = "scheduler"
    #: Scheduler's rank to the coordinator: ``(address, link to the dashboard)``.
    ADDRESS = "address"
    #: Coordinator to each rank: its `Start`.
    START = "start"
    #: Every rank to the coordinator: its workers are there; with the steps of its timeline.
    READY = "ready"
    #: Any rank to the coordinator: a `Failure`.
    FAILED = "failed"
    #: Coordinator to all: a `Cluster`; all its workers are there.
    CLUSTER_UP = "cluster-up"
    #: Coordinator to all: the command ends here, without a cluster; or to a late rank: the cluster starts without it. An exit
    #: code.
    DONE = "done"
    #: Coordinator to all: the `Failure` that all raise.
    FAIL = "fail"


@dataclass(frozen=True)
class Registration:
    """What a rank that can take part tells the coordinator first."""

    #: Where it runs.
    host: str
    #: None: it could not be taken, which only `check` goes on with.
    inventory: Inventory | None
    #: The networks of its host.
    interfaces: tuple[Interface, ...]
    #: The interface that it was asked to use.
    wanted_interface: str | None
    #: Options that must be the same on all ranks, as (name, value): see `coordinator.shared_options`.
    shared_options: tuple[tuple[str, Any], ...]
    #: Whether this rank has a script to run, should it be the client's.
    has_client: bool = True
    #: How far its workers can use UCX.
    ucx: UcxAbility = field(default_factory=UcxAbility)
    #: The sizes of device memory that its workers are to use (`plan.device_memory.device_options`); ranks may differ.
    device_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listen:
    """The order to listen for the reachability test."""

    #: In the scheduler's place; None: it is not the scheduler's rank.
    scheduler: Node | None = None
    #: In the place of its node's workers; None: another rank of the node does, or there is only one node.
    workers: Node | None = None
    #: Whether to inspect the dashboard's port as well.
    dashboard: bool = False


@dataclass(frozen=True)
class Listening:
    """The ports of a `Listen`; 0: it can't, or is not to."""

    scheduler: int = 0
    workers: int = 0
    #: Why the scheduler can't listen.
    error: str = ""
    #: Why the dashboard's port can't be used; empty: it can, or was not inspected.
    dashboard: str = ""
    #: Whether the dashboard's address is not one of this node's, so that the scheduler can't start.
    elsewhere: bool = False


@dataclass(frozen=True)
class Connect:
    """The order to connect to the scheduler and to other nodes."""

    #: Without a port nobody listens there. Without a token it is a running scheduler, of another job.
    scheduler: Node
    peers: tuple[Node, ...] = ()
    #: Seconds for each step of a connection.
    timeout: float = CONNECT_TIMEOUT


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up, as a rank knows it."""

    #: The scheduler's.
    address: str
    #: Link to the dashboard, with its token, for the client rank.
    dashboard: str | None = field(repr=False)
    #: For the client rank.
    plan: Plan | None = None
    #: For the client rank: how workers exchange data, where that is worth a line.
    transport: str = ""
    #: For rank 0: ranks that have not responded, and take no part.
    absent: tuple[int, ...] = ()
    #: Dask configuration with the credentials, for the client rank.
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: For the client rank, if a report is wanted: by rank, its host, and what it has done until it was ready.
    hosts: dict[int, str] = field(default_factory=dict, repr=False)
    steps: dict[int, list[Step]] = field(default_factory=dict, repr=False)


#: The type of what each kind carries.
PAYLOADS: Mapping[str, Any] = {
    Kind.STEP: str,
    Kind.REGISTRATION: Registration,
    Kind.LISTEN: Listen,
    Kind.LISTENING: Listening,
    Kind.CONNECT: Connect,
    Kind.REACHED: Reach,
    Kind.SCHEDULER: SchedulerSettings,
    Kind.ADDRESS: tuple[str, str | None],
    Kind.START: Start,
    Kind.READY: list[Step],
    Kind.FAILED: Failure,
    Kind.CLUSTER_UP: Cluster,
    Kind.DONE: int,
    Kind.FAIL: Failure,
}


#: Seconds between polls: while something is under way, and otherwise (0.6 % of a core at most).
POLL_BUSY, POLL_IDLE = 0.01, 0.1


class Channels:
    """The mailbox of a rank and the control pipe of its agent."""

    def __init__(self, mailbox: Mailbox, agent: AgentProcess | None) -> None:
        self.mailbox = mailbox
        self.agent = agent
        self.rank = mailbox.rank
        self.size = mailbox.size
        #: Scratch of agents that have ended, which could not be removed in time.
        self.left: list[str] = []
        #: The present step of this rank.
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
        events += self.mailbox.receive()
        agent = self.agent
        if agent is None:
            if not events:
                time.sleep(timeout)
            return events
        answers = agent.events(0.0 if events else timeout)
        if answers:
            # first what came meanwhile: a script that held the interpreter makes other ranks seem silent
            events += self.mailbox.receive()
        events += [Event(None, kind, payload) for kind, *payload in answers]
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
