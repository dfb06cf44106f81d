"""The orders of a rank to its agent (`Order`) and the agent's answers (`Answer`): plain data, light to import on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from dask_gpu_mpi.errors import DaskGpuMpiError, Problem
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import Plan


class Begin(NamedTuple):
    """The first frame, sent before the configuration is known."""

    #: Whether the agent imports dask_cuda as well.
    cuda: bool
    #: Whether it loads UCX.
    ucx: bool
    #: Whether a child of it inspects the GPUs.
    inspect: bool


class Order(StrEnum):
    """An order to the agent, after `Begin` and `Configuration`, sent with one object.

    >>> Order.START_WORKERS == "workers"  # as it is sent
    True
    """

    #: None: all ranks have joined, and this one no longer has to be watched.
    JOINED = "joined"
    #: `SchedulerSettings`.
    START_SCHEDULER = "scheduler"
    #: ``(path, scheduler id)`` of the scheduler file, which the agent removes if the rank has not.
    SCHEDULER_FILE = "scheduler-file"
    #: `plan.model.Start`.
    START_WORKERS = "workers"
    #: None: the cluster is up, the dashboard may follow. The agent passes it on to the scheduler's process.
    DASHBOARD = "dashboard"
    #: ``(names, text)``: these workers are lost for good, with their rank; the scheduler's process keeps the text.
    LOST_RANK = "lost-rank"
    #: None: the scheduler stays.
    CLOSE_WORKERS = "close-workers"
    #: None: the same as the end of the control pipe. The agent passes it on to the scheduler's process.
    CLOSE = "close"


class Answer(StrEnum):
    """An agent's message about itself, its workers or the scheduler's process, sent with a payload."""

    #: Path of the scratch directory: it has imported, and its configuration is right.
    PREPARED = "prepared"
    #: Address, port of the HTTP server or None, id.
    SCHEDULER_UP = "scheduler"
    #: Exit code; not sent while the agent closes.
    SCHEDULER_ENDED = "scheduler-ended"
    #: The scheduler has had a client, of any process; not sent before `Order.DASHBOARD`.
    CLIENT = "client"
    #: Names of workers that have not come, or are gone and whose agents don't answer, every few seconds; only with
    #: `tolerate_lost_ranks`.
    UNREACHABLE = "unreachable"
    #: Number of workers, steps of the timeline.
    READY = "ready"
    #: Name of a worker that has ended for good, and why its nanny does not restart it; None: it was retired, for example.
    WORKER_ENDED = "worker-ended"
    #: Whether one of them has failed.
    WORKERS_ENDED = "workers-ended"
    #: Its workers have closed.
    WORKERS_CLOSED = "closed"
    #: As the fields of a `Failure`, at least the problem: an order has failed.
    FAILED = "failed"
    #: Why the agent ends now, without an order; `handle.AgentProcess` keeps it for `exit_text`.
    ENDED = "ended"
    #: How it died, and whether the script has closed the pipe. The rank makes this answer itself, when the agent is lost.
    LOST = "agent-lost"


def failed(error: BaseException) -> tuple[Any, ...]:
    """The answer for an error."""
    if isinstance(error, DaskGpuMpiError):
        return Answer.FAILED, error.problem, error.exit_code, type(error).__name__
    return Answer.FAILED, Problem(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Configuration:
    """The second frame: all settings that the agent needs before it starts anything."""

    options: Options
    #: The rank's Dask configuration, so that settings of the script before ``initialize()`` hold for its workers too.
    dask_config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: When to end a rank that has not joined the others, and so is stuck in its MPI library: ``time.monotonic()``, which is the
    #: same for all processes of a host.
    mpi_deadline: float = math.inf
    #: Whether this agent reports that: one is enough.
    speaks: bool = True


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings that the scheduler's process needs beyond the options."""

    #: Address to listen on; None: Dask's choice.
    listen: str | None
    #: Dask configuration, the credentials among it.
    config: dict[str, Any] = field(repr=False)
    #: The token of the dashboard, which the scheduler's rank makes; empty: it is open.
    token: str = field(repr=False)
    #: UUID of the GPU on which it may hold data that a client sends or fetches through it over UCX (as by ``client.run``). It
    #: makes no context before that. Empty: none.
    device: str = ""
    #: For `top` and others who inspect the job.
    plan: Plan | None = field(default=None, repr=False)
