"""Rank 0's agent leads the job: it drives the state machines of the start and of the end with what comes to the hub.

`agent.part` makes a `Leader` when rank 0 enters the job. The state machine is `startup.coordinator` until the cluster is up, then
`agent.ending`. Both are given each message, each lost connection and, by `_tick`, the time, and send their orders by the hub. The
leader also shows how far the start has come (`Progress`), and leaves a file that tells `launch` how the job has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from dask_gpu_mpi.agent.ending import EndCoordinator
from dask_gpu_mpi.agent.hub import Hub
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.files import open_to_append, remove
from dask_gpu_mpi.base.streams import GONE, LOST, RUN, of_run, write
from dask_gpu_mpi.base.text import fold_names
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import FLUSH, UNHEARD, closing_slack
from dask_gpu_mpi.errors import DaskGpuMpiError, Problem
from dask_gpu_mpi.machine.nvidia import closing_time
from dask_gpu_mpi.network.scheduler_file import read_target
from dask_gpu_mpi.startup.coordinator import Coordinator
from dask_gpu_mpi.startup.messages import COORDINATOR, Cluster, Configuration, Entry, Event, Kind

#: Seconds between two looks at the clock: while the cluster starts, or ends, and while it runs.
TICK, TICK_RUNNING = 0.05, 1.0
#: The step of a rank that has met the others, until its agent reports another one.
IMPORTING = "waiting for its agent to import Dask"


class Leader:
    """Leads the job.

    ``deliver(kind, payload)`` gives rank 0's own agent a message; by `send` that agent gives the hub one. ``on_over(code)`` is
    called at the end: the exit code that the job must have although its script has another one, or 0.
    """

    def __init__(
        self,
        configuration: Configuration,
        entry: Entry,
        timeline: Timeline,
        deliver: Callable[[str, Any], None],
        on_over: Callable[[int], None],
    ) -> None:
        self._configuration = configuration
        self._options = configuration.options
        self._entry = entry
        self._on_over = on_over
        self._hub = Hub(entry.size, deliver, self._on_event, self._on_lost)
        self.send = self._hub.receive_local
        #: None: the cluster has not started yet.
        self._ending: EndCoordinator | None = None
        #: Ranks that were lost while the cluster started.
        self._gone: set[int] = set()
        #: Whether the job has ended, as far as the hub is concerned.
        self._over = False
        #: Seconds until the next tick: `TICK` or `TICK_RUNNING`.
        self._every = TICK
        self._timer: asyncio.TimerHandle | None = None
        options, plan_only = self._options, configuration.plan_only
        # the hub's certificate is that of the cluster, if it has one
        is_sealed = options.scheduler and options.protocol.encrypts
        attaches = not (options.scheduler or plan_only)
        self._coordinator = Coordinator(
            entry.hosts,
            options,
            timeline,
            send=self._hub.send,
            deadline=configuration.deadline,
            plan_only=plan_only,
            credentials=entry.config if is_sealed else {},
            target=read_target(options) if attaches else None,
        )
        self._coordinator.steps.update(dict.fromkeys(range(entry.size), IMPORTING))
        self._progress = Progress(configuration.started)
        #: The file that tells `launch` how the job has ended, or that a rank has gone; None: it needs none.
        self._mark: Path | None = None
        if options.log_directory is not None and not plan_only and RUN in os.environ:
            self._mark = Path(options.log_directory, of_run("ended", os.environ)).absolute()
            with contextlib.suppress(OSError):
                remove(self._mark)  # of a job before this one
        # To scan the messages of thousands of ranks again and again would take longest of all.
        self._collects = gc.isenabled()
        gc.disable()

    async def listen(self, sock: socket.socket | None) -> None:
        """Begin, with this listening socket; None: there are no other ranks."""
        if sock is not None:
            await self._hub.serve(sock, self._entry.config)
        self._tick()

    def fail(self, rank: int, failure: Failure) -> None:
        """A rank whose agent is not connected has failed."""
        self._on_event(Event(rank, Kind.FAILED, failure))

    # -- the start ----------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        now = time.monotonic()
        if self._ending is not None:
            self._handle_running(self._ending, event, now)
        elif event.kind == Kind.GONE:
            self._lose(event.source, "its process", now)
        else:
            self._coordinator.handle(event, now)
            self._follow_start(now)

    def _on_lost(self, rank: int) -> None:
        now = time.monotonic()
        if self._ending is not None:
            self._ending.disconnected(rank, now)
        elif self._coordinator.outcome is None:
            self._lose(rank, "its agent", now)

    def _lose(self, rank: int, what: str, now: float) -> None:
        """A rank is lost while the cluster starts; one that may be is waited for until the deadline."""
        if rank in self._gone:
            return
        self._gone.add(rank)
        if not self._options.survives:
            problem = Problem(
                f"{what} ended while the cluster started",
                fix="read its output above; out of memory, most often",
            )
            self._coordinator.handle(Event(rank, Kind.FAILED, Failure(problem)), now)

    def _tick(self) -> None:
        if self._over:
            return
        self._timer = asyncio.get_running_loop().call_later(self._every, self._tick)
        now = time.monotonic()
        if self._ending is not None:
            self._ending.tick(now)
            self._end_if_over(self._ending)
            return
        self._coordinator.tick(now)
        self._follow_start(now)

    def _follow_start(self, now: float) -> None:
        """Show how far the start has come; if it is over, run the cluster, or report how the start has ended."""
        outcome = self._coordinator.outcome
        if outcome is None:
            if not self._configuration.plan_only:
                self._progress.show(now, self._coordinator.progress)
            return
        if self._over or self._ending is not None:
            return
        self._progress.clear()
        if self._collects:
            gc.enable()
        if isinstance(outcome, Cluster):
            self._begin_running(outcome)
        else:
            self._over = True  # the start ends without a cluster
            if isinstance(outcome, DaskGpuMpiError):
                # Rank 0 prints it before any other can exit: a launcher ends all ranks when one fails.
                self._hub.send(COORDINATOR, Kind.FAIL, (Failure.of(outcome), outcome.fatal))
            else:  # the coordinator has sent DONE to the others
                self._hub.send(COORDINATOR, Kind.DONE, outcome)

    async def spread(self, failure: Failure, fatal: bool) -> bool:
        """Send all other ranks the failure that rank 0 has printed; returns whether all of their agents have ended then."""
        informed: set[int] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNHEARD):
                while self._hub.connections:
                    for rank in self._hub.connections.keys() - informed:  # one may have connected just now
                        self._hub.send(rank, Kind.FAIL, (failure, fatal))
                        informed.add(rank)
                    await asyncio.sleep(TICK)
        return not self._hub.connections and len(informed) == self._entry.size - 1

    def end(self) -> None:
        """Rank 0 has ended: so does the job, unless it has already. Where ranks may be lost, no launcher tells the others."""
        if self._ending is not None and not self._ending.ended and not self._options.survives:
            self._ending.end_cluster(time.monotonic(), final=True)

    async def close(self) -> None:
        """Let the last messages leave."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        await self._hub.close(FLUSH)

    # -- the running cluster, and its end -----------------------------------------------------------------------

    def _begin_running(self, cluster: Cluster) -> None:
        """The cluster is up: from now on it may end."""
        options = self._options
        assert cluster.plan is not None  # the coordinator makes one
        own = closing_time(options, os.environ) + 1.0
        # The others need as long as this rank, and the messages some time.
        slack = closing_slack(options.shutdown_timeout)
        self._ending = EndCoordinator(
            cluster.plan,
            self._hub.send,
            options,
            has_client=self._coordinator.has_client,
            absent=cluster.absent,
            closing_time=own + slack,
        )
        self._hub.send(COORDINATOR, Kind.UP, cluster)
        self._every = TICK_RUNNING
        for rank in self._gone.difference(cluster.absent):
            self._ending.disconnected(rank, time.monotonic())

    def _handle_running(self, ending: EndCoordinator, event: Event, now: float) -> None:
        ending.handle(event, now)
        if event.kind == Kind.GONE and ending.has_lost_too_many:
            # `launch` reads it if the launcher ends with code 0, as Open MPI's does after the loss of a daemon. If the rank was
            # killed, no node is lost, though Hydra may end with the code that it has then.
            self._write_mark(GONE)
        # one of a rank that was left out is for the coordinator
        if event.kind == Kind.ENTERED and not self._coordinator.handle(event, now):
            self._order_another_agent(ending, event.source)
        if ending.is_ending and self._every != TICK and self._timer is not None:
            self._every = TICK
            self._timer.cancel()
            self._tick()
        self._end_if_over(ending)

    def _order_another_agent(self, ending: EndCoordinator, rank: int) -> None:
        """Order an agent that has replaced another one of its rank to start the same, or to end."""
        start = self._coordinator.start_of(rank, without=ending.ended_workers)
        if ending.is_ending or start is None:
            self._hub.send(rank, Kind.END, ending.last_words)
        else:
            self._hub.send(rank, Kind.START, start)

    def _end_if_over(self, ending: EndCoordinator) -> None:
        if not ending.over or self._over:
            return
        self._over = True
        code = ending.outcome()
        if not code:
            self._leave_mark(ending)
        self._on_over(code)

    def _leave_mark(self, ending: EndCoordinator) -> None:
        """Write the file ``ended`` into the log directory, with the script's exit code if ranks are lost and it is known.

        A launcher ends with another code if a rank was killed. Below Slurm, Open MPI 5's ``mpirun`` ends with code 0 when it has
        lost one of its daemons, which a job script would not notice.
        """
        # A launcher does not notice a node that is silent, and waits for it. It ends by itself after another loss.
        ends_itself = ending.lost_ranks and not (self._options.survives or self._hub.has_lost_node)
        if ends_itself:
            return
        more = f" {LOST}" if ending.has_lost_too_many else ""
        code = 1 if ending.lost is not None and not ending.code else ending.code
        text = f"{code}{more}\n" if ending.lost_ranks and code is not None else ""
        self._write_mark(text)

    def _write_mark(self, text: str) -> None:
        if self._mark is not None:
            with contextlib.suppress(OSError), open(open_to_append(self._mark), "w") as mark:
                mark.write(text)


#: Seconds before the first line, and between lines: on a terminal, and elsewhere.
ON_TERMINAL, IN_FILE = 0.5, 10.0
#: Hosts named at most.
NAMED = 8


class Progress:
    """Shows the hosts that are awaited since the start began at `started`; on standard error, unless another stream is given.

    On a terminal one line changes; elsewhere each is another line.
    """

    def __init__(self, started: float, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._every = ON_TERMINAL if self._terminal else IN_FILE
        self._next = started + self._every
        self._shown = False

    def show(self, now: float, progress: Callable[[], tuple[int, int | None, Sequence[str]]]) -> None:
        """Print how many workers are ready, and which hosts are awaited, as `Coordinator.progress` counts them.

        It does neither while it is too early for another line.
        """
        if now < self._next:
            return
        self._next = now + self._every
        ready, planned, hosts = progress()
        known = sorted(set(hosts))
        names = fold_names(known[:NAMED]) + (" and others" if len(known) > NAMED else "")
        count = "starting" if planned is None else f"{ready} of {planned} workers"
        self._write(f"dask_gpu_mpi: {count}, waiting for {names or 'the scheduler'}")

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._terminal and self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        write(self._stream, f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._shown = True
