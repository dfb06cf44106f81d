"""What the ranks of a job send each other: the kinds of messages, and what those of the start carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.diagnostics.job_facts import JobFacts
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.mpi.gathering import FAIL
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.node_pairs import Lost, Node
from dask_gpu_mpi.network.reachability import Tokens
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.workers.settings import Start

__all__ = [
    "COORDINATOR",
    "PAYLOADS",
    "Cluster",
    "Connect",
    "Kind",
    "Listen",
    "Listening",
    "Registration",
    "Start",
]

#: Rank that gathers the registrations and makes the plan.
COORDINATOR = 0


class Kind(StrEnum):
    """Kinds of messages between ranks; each names its sender, its receivers and its payload."""

    #: Every rank to the coordinator: a `Registration`.
    REGISTRATION = "registration"
    #: Coordinator to the scheduler's rank and to a rank of each node: a `Listen`, for the reachability test.
    LISTEN = "listen"
    #: These to the coordinator: a `Listening`.
    LISTENING = "listening"
    #: Coordinator to all: a `Connect`.
    CONNECT = "connect"
    #: Every rank to the coordinator: it has connected to the scheduler's host; with the peers (`Lost`) that it has not reached.
    REACHED = "reached"
    #: Coordinator to the scheduler's rank: ``(address to listen on, Dask configuration, UUID of a GPU)``.
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
    #: Coordinator to all: the `Failure` that all raise.
    FAIL = FAIL


@dataclass(frozen=True)
class Registration:
    """What a rank sends first: its inventory, or why it can't take part."""

    #: Where it runs.
    host: str
    #: None with a failure.
    inventory: Inventory | None
    #: The networks of its host.
    interfaces: tuple[Interface, ...]
    #: The interface that it was asked to use.
    wanted_interface: str | None
    #: Options that must be the same on all ranks, as (name, value): see `registrations.shared_options`.
    shared_options: tuple[tuple[str, Any], ...]
    #: Why this rank can't take part.
    failure: Failure | None = None
    #: Whether this rank has a script to run, should it be the client's.
    has_client: bool = True
    #: How far its workers can use UCX.
    ucx: UcxAbility = field(default_factory=UcxAbility)
    #: The sizes of device memory that its workers are to use (`plan.device_memory.device_options`); ranks may differ.
    device_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listen:
    """Where a rank is to listen for the reachability test, and for whom."""

    address: str | None
    #: In the scheduler's place; None: it is not the scheduler's rank.
    scheduler: Tokens | None = None
    #: In the place of its node's workers; None: another rank of the node does, or there is only one node.
    workers: Tokens | None = None


class Listening(NamedTuple):
    """The ports of a `Listen`; 0: it can't, or is not to."""

    scheduler: int = 0
    workers: int = 0


@dataclass(frozen=True)
class Connect:
    """To whom a rank is to connect."""

    #: ``"host:port"`` of the scheduler.
    scheduler: str
    #: What that is, for reports.
    where: str
    #: None: a running scheduler listens there.
    tokens: Tokens | None
    #: Other nodes.
    peers: tuple[Node, ...] = ()


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
    #: Dask configuration with the credentials, for the client rank.
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: For the client rank, if a report is wanted: by rank, its host, and what it has done until it was ready.
    hosts: dict[int, str] = field(default_factory=dict, repr=False)
    steps: dict[int, list[Step]] = field(default_factory=dict, repr=False)


#: The type of what each kind carries.
PAYLOADS: Mapping[str, Any] = {
    Kind.REGISTRATION: Registration,
    Kind.LISTEN: Listen,
    Kind.LISTENING: Listening,
    Kind.CONNECT: Connect,
    Kind.REACHED: tuple[Lost, ...],
    Kind.SCHEDULER: tuple[str | None, dict[str, Any], str, JobFacts],
    Kind.ADDRESS: tuple[str, str | None],
    Kind.START: Start,
    Kind.READY: list[Step],
    Kind.FAILED: Failure,
    Kind.CLUSTER_UP: Cluster,
    Kind.FAIL: Failure,
}
