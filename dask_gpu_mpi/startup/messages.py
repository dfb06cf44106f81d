"""The messages of a job: between a rank and its agent, between the agents and the hub, between an agent and its scheduler.

They are one set (`Kind`). An agent passes on the messages that are not its own: those of its rank to the hub, those of the hub to
its rank. Agents exchange plain data of the types in `PAYLOADS` (`base.plain_data`), a rank and its agent any objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import Node
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan, Start

#: Rank whose agent has the hub, gathers the registrations and makes the plan.
COORDINATOR = 0


class Kind(StrEnum):
    """Kinds of messages, each with sender, receiver and payload. "Hub" stands for rank 0's agent, which leads the job."""

    # The meeting (`startup.meeting`), and a rank and its agent, at the start.

    #: Rank to rank 0, and the answer: a `Hello`.
    HELLO = "hello"

    #: Agent to rank: path of the scratch directory; it has imported Dask, and its configuration is right.
    PREPARED = "prepared"
    #: Rank to agent: an `Entry`. In the meeting, rank 0 to each rank: a `meeting.Invitation`.
    ENTER = "enter"
    #: Agent to rank: it is connected to the hub; the descriptor of that connection comes along. In the meeting, rank to rank 0:
    #: its agent is. Agent to hub, as its first message: its rank, and whether another agent was connected before it.
    ENTERED = "entered"

    # The start.

    #: Agent to hub: the step that it begins, of those that may hang.
    STEP = "step"
    #: Agent to hub: a `Registration`.
    REGISTRATION = "registration"
    #: Hub to the scheduler's rank: its `SchedulerSettings`.
    SCHEDULER = "scheduler"
    #: Scheduler's process to its agent: ``(address, port of the HTTP server or None, id)``.
    SCHEDULER_UP = "scheduler up"
    #: Scheduler's rank to hub: ``(address, link to the dashboard)``.
    ADDRESS = "address"
    #: Hub to each agent: its `Start`. Agent to rank: seconds that the start may still take.
    START = "start"
    #: Agent to hub: its workers are there; the steps of its timeline, and the address of one of its workers, or an empty text.
    READY = "ready"
    #: Hub to an agent of each node: the `Node`s to connect to.
    CONNECT = "connect"
    #: Agent to hub: by error the hosts that it has not reached.
    REACHED = "reached"
    #: A `Failure`: agent to hub; agent to rank while it is not connected; scheduler's process to agent; in the meeting, rank to
    #: rank 0. Rank to agent: ``(rank, failure)``, its own or, on rank 0, that of a rank whose agent is not connected.
    FAILED = "failed"
    #: Hub to agents, agent to rank: a `Cluster`; all its workers are there. Agent to scheduler: the dashboard may follow.
    UP = "up"
    #: Hub to agents, agent to rank: the command ends here, without a cluster, or the cluster starts without this late rank.
    DONE = "done"
    #: Hub to agents, agent to rank: the `Failure` that all raise, and whether ranks are silent, so that the job has to be
    #: aborted. Rank 0 prints it, and then sends it to all, in the meeting and by its agent.
    FAIL = "fail"

    # The running cluster.

    #: Scheduler's process to hub, hub to the client's rank: the scheduler has had a client, of any process.
    CLIENT = "client"
    #: Agent to hub: name of a worker that has ended for good, and whether it has failed.
    WORKER_ENDED = "worker ended"
    #: Agent to hub: all its workers have ended by themselves; whether one of them has failed.
    WORKERS_ENDED = "workers ended"
    #: Hub to the scheduler's process: ``(names, text)``, these workers are lost for good, with their rank.
    LOST = "lost"
    #: Rank without the script to hub, hub to the client's rank: the number of the signal that it was sent.
    SIGNAL = "signal"
    #: Client's rank to hub, hub to all: the script runs its `finally` after a signal.
    BUSY = "busy"
    #: To the hub: ``(final, lost, code)``, the cluster is over. `final`: the script has ended too; `lost`: how the cluster was
    #: lost; `code`: the script's exit code, as far as it is known.
    OVER = "over"
    #: Agent to hub: its rank has ended, and it ends itself. Agent to rank: its connection to the hub has ended; whether by
    #: silence, so that this node may be the one that is cut off.
    GONE = "gone"

    # The end.

    #: Hub to agents, agent to rank: the cluster is over, the script continues. How the cluster was lost; None: it was closed.
    #: Agent to scheduler: it may close when its workers have left it.
    STOP = "stop"
    #: Hub to agents, agent to rank: the job ends. The exit code of the script if it is known, and the signal that ends the job.
    END = "end"
    #: Agent to hub: its workers have closed. Agent to rank: its part has.
    CLOSED = "closed"
    #: Hub to the scheduler's rank: all workers have closed, the scheduler may close.
    RELEASE = "release"
    #: Agent to rank: its part has ended; the exit code that the job must have because ranks did not respond, or 0. Also the
    #: answer to rank 0's FAIL: 0 if all other agents have ended.
    ENDED = "ended"
    #: Rank to agent, agent to scheduler: end now; the same as the end of the pipe. Rank 0 to ranks: the meeting is over.
    CLOSE = "close"


class Event(NamedTuple):
    """A message to the hub, and the rank whose agent sent it."""

    source: int
    kind: str
    payload: Any


@dataclass(frozen=True)
class Configuration:
    """The second frame that an agent gets, after `boot.Begin`: all settings that it needs before it starts anything."""

    options: Options
    #: The rank's Dask configuration, so that settings of the script before ``initialize()`` hold for its workers too.
    dask_config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: Whether this rank has a script to run, should it be the client's.
    has_client: bool = True
    #: Devices on which the rank's process has a CUDA context.
    contexts: tuple[str, ...] = ()
    #: MPI starts in the rank's process, which can do nothing else meanwhile.
    mpi_in_rank: bool = False
    #: Modules that the script names, and that workers with a GPU and the scheduler import while the cluster starts.
    imports: tuple[str, ...] = ()
    #: Whether this agent ends, after the rank, the forks of its script, and the programs that the script has started.
    ends_forks: bool = False
    ends_programs: bool = False
    #: The command `plan`: the start ends with the plan.
    plan_only: bool = False
    #: ``time.monotonic()`` of the start, and of the start-up deadline; the same clock for all processes of a node.
    started: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True)
class Entry:
    """What an agent needs to enter the job, once the ranks have met."""

    rank: int
    size: int
    #: Address and port of the hub.
    hub: tuple[str, int]
    #: Dask configuration with the certificates of the hub.
    config: dict[str, Any] = field(repr=False)
    #: Of rank 0: the host of each rank. (The hub's listening socket comes with the frame.)
    hosts: Mapping[int, str] = field(default_factory=dict)
    #: Whether the launcher needs no new connection, since no rank stays an MPI process.
    closes_launcher: bool = False
    #: Another agent of this rank was lost before; whether its workers are to be started again.
    again: bool = False
    workers: bool = True
    #: The steps of the rank until now, for the report.
    steps: Sequence[Step] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings that the scheduler's process needs beyond the options."""

    #: Address to listen on; None: Dask's choice.
    listen: str | None
    #: Dask configuration, the credentials among it.
    config: dict[str, Any] = field(repr=False)
    #: The token of the dashboard, which the scheduler's rank makes; empty: it is open.
    token: str = field(repr=False)
    #: UUID of the GPU for data that a client sends or fetches through it over UCX (as by ``client.run``); empty: none.
    device: str = ""
    #: For `top` and others who inspect the job.
    plan: Plan | None = field(default=None, repr=False)
    #: Whether the job has a script, with which the cluster ends.
    has_script: bool = False
    #: Modules to import while workers start, since the script names them; from its agent.
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registration:
    """What a rank that can take part sends the hub first."""

    #: Host name of the rank.
    host: str
    inventory: Inventory
    #: The networks of its host.
    interfaces: tuple[Interface, ...]
    #: The interface that the user wants on this rank.
    wanted: str | None
    #: Options that must be the same on all ranks, as (name, value): see `coordinator.shared_options`.
    shared_options: tuple[tuple[str, Any], ...]
    #: Whether this rank has a script to run, should it be the client's.
    has_client: bool = True
    #: How far its workers can use UCX.
    ucx: UcxAbility = field(default_factory=UcxAbility)

    @property
    def machine(self) -> str:
        """The same for all ranks of a node, and for no other."""
        return self.host + self.inventory.boot_id


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
    #: Ranks that have not responded, and take no part.
    absent: tuple[int, ...] = ()
    #: Dask configuration with the credentials, for the client rank.
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: For the client rank, if a report is wanted: by rank, its host, and what it has done until it was ready.
    hosts: dict[int, str] = field(default_factory=dict, repr=False)
    steps: dict[int, list[Step]] = field(default_factory=dict, repr=False)


#: The type of what each kind carries between agents and hub.
PAYLOADS: Mapping[str, Any] = {
    Kind.ENTERED: tuple[int, bool],
    Kind.STEP: str,
    Kind.REGISTRATION: Registration,
    Kind.SCHEDULER: SchedulerSettings,
    Kind.ADDRESS: tuple[str, str | None],
    Kind.START: Start,
    Kind.READY: tuple[list[Step], str],
    Kind.CONNECT: tuple[Node, ...],
    Kind.REACHED: dict[str, list[str]],
    Kind.FAILED: Failure,
    Kind.UP: Cluster,
    Kind.DONE: int,
    Kind.FAIL: tuple[Failure, bool],
    Kind.CLIENT: None,
    Kind.WORKER_ENDED: tuple[str | int, bool],
    Kind.WORKERS_ENDED: bool,
    Kind.LOST: tuple[list[str], str],
    Kind.SIGNAL: int,
    Kind.BUSY: None,
    Kind.OVER: tuple[bool, str | None, int | None],
    Kind.GONE: None,
    Kind.STOP: str | None,
    Kind.END: tuple[int, int | None],
    Kind.CLOSED: None,
    Kind.RELEASE: None,
}
