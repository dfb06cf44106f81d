"""An agent that dies is restarted, with its workers, but not for ever."""

from __future__ import annotations

import time
from dataclasses import replace

from dask_gpu_mpi.agent.handle import start_agent
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.job.ending import EndKind
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR
from dask_gpu_mpi.startup.relay import start_workers

__all__ = ["DELAYS", "AgentRestarts"]

#: Seconds before each start.
DELAYS = (0.5, 2.0, 8.0)


class AgentRestarts:
    """The agent of a rank that may lose it: one without the scheduler."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._channels = joined.channels
        self.tried = 0
        #: When to restart it (``time.monotonic()``), if at all.
        self.due: float | None = None
        #: Its workers that have ended for good, by name, and whether one of them has failed: another agent does not start them.
        self._ended: set[str | int] = set()
        self.failed = False

    def worker_ended(self, name: str | int, why: str | None) -> None:
        """A worker has ended for good: because it was retired (None), or has failed too often."""
        self._ended.add(name)
        self.failed |= why is not None

    @property
    def _workers(self) -> tuple[WorkerPlan, ...]:
        return tuple(worker for worker in self._joined.start.workers if worker.name not in self._ended)

    def lost(self, text: str) -> None:
        """The agent has died, and its workers with it: start another, or remove this rank."""
        if not self._workers:
            return
        if self.tried == len(DELAYS):
            say(f"{text}; rank {self._channels.rank} removed, continuing with the other ranks")
            self._channels.send(COORDINATOR, EndKind.WORKERS_ENDED, (self._channels.rank, True))
            return
        delay = DELAYS[self.tried]
        self.tried += 1
        say(f"{text}; restarting it in {delay:g} s")
        self.due = time.monotonic() + delay

    def start_if_due(self) -> None:
        """Start another agent, if it is time; once it is `Answer.PREPARED`, it gets its workers (`start_workers`)."""
        if self.due is None or time.monotonic() <= self.due:
            return
        self.due = None
        joined = self._joined
        try:
            agent = start_agent(joined.options, joined.environ)
        except OSError as error:  # no descriptors, no memory: perhaps later
            self.lost(
                f"the agent of rank {self._channels.rank} on {joined.host} could not be started ({error.strerror})"
            )
            return
        self._channels.agent = agent
        agent.configure(joined.options, speaks=False)
        agent.send(Order.JOINED)

    def start_workers(self) -> None:
        """Give the new agent this rank's workers."""
        start_workers(self._channels, replace(self._joined.start, workers=self._workers))
