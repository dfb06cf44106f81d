"""The orders of a rank to its agent (`Order`) and the agent's answers (`Answer`): plain data, light to import on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.view.job_facts import JobFacts

__all__ = ["UNCONFIGURED", "Answer", "Configuration", "Order", "SchedulerSettings"]

#: Seconds until an agent that its rank sends nothing ends.
UNCONFIGURED = 3600.0


class Order(StrEnum):
    """An order to the agent, after the `Configuration`; each goes with one object.

    >>> Order.START_WORKERS == "workers"  # as it is sent
    True
    """

    #: None: MPI has come together, and the rank no longer has to be watched.
    JOINED = "joined"
    #: `SchedulerSettings`.
    START_SCHEDULER = "scheduler"
    #: ``(path, scheduler id)`` of the scheduler file, which the agent removes if the rank does not get so far.
    SCHEDULER_FILE = "scheduler-file"
    #: `workers.settings.Start`.
    START_WORKERS = "workers"
    #: None: the cluster is up, the dashboard may follow. The agent passes it on to the scheduler's process.
    DASHBOARD = "dashboard"
    #: None: the scheduler stays.
    CLOSE_WORKERS = "close-workers"
    #: None: as the end of the control pipe. The agent passes it on to the scheduler's process.
    CLOSE = "close"


class Answer(StrEnum):
    """An agent's message about itself, its workers or the scheduler's process; each goes with its own payload."""

    #: Path of the scratch directory: it has imported, and finds its configuration good.
    PREPARED = "prepared"
    #: Address, port of the HTTP server or None, id.
    SCHEDULER_UP = "scheduler"
    #: Exit code; not said while the agent closes.
    SCHEDULER_ENDED = "scheduler-ended"
    #: The scheduler has had a client, of any process; not said before `Order.DASHBOARD`.
    CLIENT = "client"
    #: Number of workers, steps of the timeline.
    READY = "ready"
    #: Name of one that has ended for good, and why its nanny does not restart it; None: in order, as one that is retired.
    WORKER_ENDED = "worker-ended"
    #: Whether one of them has failed.
    WORKERS_ENDED = "workers-ended"
    #: Its workers have closed.
    WORKERS_CLOSED = "closed"
    #: Text, exit code, and of an error of ours the name of its class: an order could not be obeyed.
    FAILED = "failed"
    #: Why the agent ends now, of itself; `handle.AgentProcess` keeps it for `exit_text`.
    ENDED = "ended"
    #: How it died, whether the script has closed the pipe. The rank makes it itself, when the agent is lost.
    LOST = "agent-lost"


@dataclass(frozen=True)
class Configuration:
    """The first frame: what the agent must know before it starts anything."""

    options: Options
    #: The rank's Dask configuration: what the script set before ``initialize()`` holds for its workers too.
    dask_config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: When a rank that has not joined the others is stuck in its MPI library, and is ended: ``time.monotonic()``, which is the
    #: same for all processes of a host, so that all its agents count alike.
    mpi_deadline: float = math.inf
    #: Whether to report that: one rank is enough.
    speaks: bool = True


@dataclass(frozen=True)
class SchedulerSettings:
    """What the scheduler's process needs to know."""

    #: Address to listen on.
    host: str
    #: 0 = any free one.
    port: int
    #: ``"tls"``, ``"tcp"`` or ``"ucx"``.
    protocol: str
    #: Whether to listen for HTTP, and to serve the dashboard there once the cluster is up.
    dashboard: bool
    #: ``host:port`` of the dashboard.
    dashboard_address: str
    #: Dask configuration, the credentials among it.
    config: dict[str, Any] = field(repr=False)
    #: What opens the dashboard; empty: it is open.
    token: str = field(repr=False)
    #: UUID of the GPU on which it may hold what a client sends or fetches through it over UCX (as by ``client.run``); it makes no
    #: context before. Empty: none.
    device: str = ""
    #: What it answers to those who look at the job.
    facts: JobFacts = field(default_factory=JobFacts, repr=False)
    #: Whether to record what the job does, for its report; else from when it is first asked for.
    records: bool = False
    #: Whether tasks that ask for no worker and no resource run on GPU workers alone.
    gpu_by_default: bool = False
