"""An agent that dies is started again, with its workers, but not for ever."""

from __future__ import annotations

import time

from dask_gpu_mpi.agent.handle import start_agent
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.startup.agent_settings import configuration, worker_settings
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR

__all__ = ["DELAYS", "AgentRestarts"]

#: Seconds before each start.
DELAYS = (0.5, 2.0, 8.0)


class AgentRestarts:
    """The agent of a rank that may lose it: one without the scheduler.

    Parameters
    ----------
    joined : Joined
        The rank.
    """

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._post = joined.post
        self.tried = 0
        #: When to start it again (``time.monotonic()``), if at all.
        self.due: float | None = None

    def lost(self, text: str) -> None:
        """The agent has died, and its workers with it: start another, or give this rank up."""
        if not self._joined.start.workers:
            return
        if self.tried == len(DELAYS):
            say(f"{text}; rank {self._post.rank} removed, continuing with the other ranks")
            self._post.send(COORDINATOR, "workers-ended", (self._post.rank, True))
            return
        delay = DELAYS[self.tried]
        self.tried += 1
        say(f"{text}; it is started again in {delay:g} s")
        self.due = time.monotonic() + delay

    def start_if_due(self) -> None:
        """Start another agent, if it is time; once it has said ``prepared``, it gets its workers (`start_workers`)."""
        if self.due is None or time.monotonic() <= self.due:
            return
        self.due = None
        joined = self._joined
        try:
            agent = start_agent(joined.options, joined.environ, again=True)
        except OSError as error:  # no descriptors, no memory: perhaps later
            self.lost(
                f"the agent of rank {self._post.rank} on {joined.host} could not be started ({error.strerror})"
            )
            return
        self._post.agent = agent
        agent.configure(configuration(joined.options, speaks=False))
        agent.send(Order.JOINED)

    def start_workers(self) -> None:
        """Give the new agent this rank's workers."""
        agent, start = self._post.agent, self._joined.start
        if agent is not None:
            settings = worker_settings(self._joined.options, start)
            agent.send(Order.START_WORKERS, (settings, start.workers, start.config))
