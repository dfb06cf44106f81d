"""How a rank closes its part: workers first, everywhere, then the scheduler; every wait has a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.machine.scratch import remove_scratch
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR

from .end_coordinator import EndCoordinator
from .ending import Cause, Ending
from .messages import EndKind

__all__ = ["Closing"]

#: How long, beyond its own closing, rank 0 waits until the others have closed: this part of `shutdown_timeout`,
#: and so many seconds at least.
CLOSING_SHARE, CLOSING_SLACK = 0.3, 3.0


class Closing:
    """The closing of one rank's part, once."""

    def __init__(
        self,
        joined: Joined,
        ending: Ending,
        coordinator: EndCoordinator | None,
        pump_until: Callable[[Callable[[], bool], float], None],
    ) -> None:
        self._joined = joined
        self._channels = joined.channels
        self._ending = ending
        self._coordinator = coordinator
        self._pump_until = pump_until
        #: The agent has reported that its workers have closed.
        self._workers_closed = False
        #: Rank 0 has reported that all workers have closed.
        self._released = False

    def workers_closed(self) -> None:
        """The agent has closed its workers."""
        self._workers_closed = True
        self._report()

    def release(self) -> None:
        """All ranks have closed their workers: the scheduler may close."""
        self._released = True

    def run(self) -> None:
        """Close workers everywhere, then the scheduler: a worker that loses its scheduler first logs many errors."""
        if self._ending.state.closed:
            return
        self._ending.on(Cause.CLOSE)
        joined, channels = self._joined, self._channels
        if joined.scheduler_file is not None:
            # First: a launcher may leave half a second. (The agent removes it as well, if this process does not get so far.)
            remove_scheduler_file(*joined.scheduler_file)
        own = time.monotonic() + joined.options.grace + 1.0
        self._close_workers(own)
        # From here on this rank is busy: to remove what its workers have spilled may take long.
        channels.mailbox.flush(1.0)
        if not joined.has_scheduler or not self._workers_closed:
            self._end_agent()
        # The others take as long as this rank, and the messages some time; they are handled also where this rank was slow itself.
        slack = max(CLOSING_SLACK, CLOSING_SHARE * joined.options.shutdown_timeout)
        limit = max(own, time.monotonic()) + slack
        if (coordinator := self._coordinator) is not None:
            self._pump_until(lambda: not coordinator.silent, limit)
            coordinator.release_scheduler()
        if joined.has_scheduler:
            self._pump_until(lambda: self._released or channels.agent is None, limit + 1.0)
            self._end_agent()
        self._report()  # also where its agent could not any more

    def _close_workers(self, limit: float) -> None:
        """Have the agent close its workers until `limit`, or kill it."""
        channels = self._channels
        if channels.agent is not None:
            channels.agent.send(Order.CLOSE_WORKERS)
            self._pump_until(lambda: self._workers_closed or channels.agent is None, limit)
        if not self._workers_closed:
            if channels.agent is not None:
                channels.agent.kill()
            self._report()

    def _end_agent(self) -> None:
        """End this rank's agent and remove its scratch, within the deadline; what is left then is reported."""
        channels, timeout = self._channels, self._joined.options.shutdown_timeout
        limit = time.monotonic() + timeout
        channels.drop_agent(timeout)
        left, channels.left = channels.left, []
        for path in left:  # of agents that were lost before, too
            remove_scratch(path, within=limit - time.monotonic())
            if os.path.exists(path):
                say(
                    f"warning: rank {channels.rank} on {self._joined.host}: could not remove all of {path} within {timeout:g} s "
                    "(shutdown_timeout). Fix: remove it, and set a faster local_directory or a longer shutdown_timeout"
                )

    def _report(self) -> None:
        """Report to rank 0 that this rank's workers have closed."""
        self._channels.send(COORDINATOR, EndKind.CLOSED, self._channels.rank)
