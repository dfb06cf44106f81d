"""One rank of a running cluster, until the job ends.

Nothing here waits in a call that can't be interrupted; every wait has a deadline; and whichever way the rank leaves, its agent
has ended by then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from dask_gpu_mpi.agent.handle import start_agent
from dask_gpu_mpi.agent.orders import Answer, Order
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import write
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.machine.scratch import remove_scratch
from dask_gpu_mpi.mpi import launchers
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file

from .bringup import COORDINATOR, Joined, configuration, grace, worker_settings
from .events import BRISK, CALM, Event

__all__ = ["Member"]

#: How long, beyond its own closing, rank 0 waits for the others to say that they have closed: this part of `shutdown_timeout`,
#: and so many seconds at least.
CLOSING_PART, CLOSING_SLACK = 0.3, 3.0
#: Seconds for all ranks to come to an orderly end, where the program goes on.
PARTING = 3.0
#: Seconds that a rank goes on after SIGTERM, for the script's `finally` on the client rank.
TERM_GRACE = 5.0


class Member:
    """A rank that has joined.

    Parameters
    ----------
    joined : Joined
        How it joined.
    signals : Signals
        Taken before it joined.
    leave_open : bool
        ``exit=False``: the rank goes on with work of its own when the cluster stops.
    has_client : bool
        Whether some rank runs a script.

    Attributes
    ----------
    stopped : bool
        The cluster is over; the script may go on.
    ended : int or None
        Exit code, once the job ends.
    lost : str or None
        How the cluster was lost, if it was.
    robbed : bool
        The script has closed our descriptors, and those of MPI, which can't be left in an orderly way any more.
    """

    def __init__(self, joined: Joined, signals: Signals, *, leave_open: bool, has_client: bool) -> None:
        self.joined = joined
        self.signals = signals
        self.post = joined.post
        self.rank = joined.post.rank
        self.stopped = False
        self.ended: int | None = None
        self.lost: str | None = None
        self.robbed = False
        self.leave_open = leave_open
        self._has_client = has_client
        self._parent = os.getppid()
        self._launched = launchers.detect(joined.environ) is not None
        self._lock = threading.Lock()
        self._without_workers: dict[int, bool] = {}
        self._restarts = _Restarts()
        self._restart_at: float | None = None
        #: Ranks that did not answer at the end: MPI can't be left in an orderly way.
        self.silent: list[int] = []
        self._closed: set[int] = set()
        self._told_closed = False
        #: Set by the script's SIGTERM handler; told to the others by the next `pump`, since a handler must not touch messages.
        self.busy = False
        self._told_busy = False
        self._patient = False
        self._released = False
        self._wound_down = False
        #: The cluster has ended before its script: on the other ranks, with `leave_open`, the program has gone on.
        self._scattered = False
        directory = joined.options.log_directory
        self._mark: Path | None = None
        if directory is not None and self.rank == COORDINATOR:
            # absolute: the script may change to another directory
            self._mark = Path(directory, "ended").absolute()
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)  # of a job before this one

    @property
    def over(self) -> bool:
        """Whether the cluster has ended."""
        return self.stopped or self.ended is not None

    # -- while it runs ------------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> None:
        """Handle what has happened; waits at most `timeout` seconds for it."""
        with self._lock:
            if self._restart_at is not None and time.monotonic() > self._restart_at and not self.stopped:
                self._restart()
            if self.busy and not self._told_busy:
                self._told_busy = True
                self.post.send(COORDINATOR, "busy")
            for event in self.post.events(timeout):
                if event.source is None:
                    self._on_agent(event.kind, event.payload)
                else:
                    self._on_mail(event)

    def _on_mail(self, event: Event) -> None:
        kind, payload = event.kind, event.payload
        if kind == "stop":
            self.stopped = self._scattered = True
            if self.joined.start.is_client:
                self.lost = payload  # for the script; the coordinator has said it
        elif kind == "busy":
            self._patient = True
            if self.rank == COORDINATOR:
                self.post.mailbox.send_all("busy")
        elif kind == "end":
            self.ended = payload
        elif kind == "release":
            self._released = True
        # the rest is for the coordinator only
        elif kind == "closed":
            rank, steps = payload
            self._closed.add(rank)
            self.joined.steps.setdefault(rank, []).extend(steps)
        elif kind == "over":
            self._over(*payload)
        elif kind == "workers-ended":
            self._on_workers_ended(*payload)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        if kind == Answer.WORKERS_CLOSED:
            self._told_closed = True
            self.joined.timeline.add(payload[0])
            self.joined.timeline.lap("close workers")
            self._tell_closed()
        elif self.stopped or self.ended is not None:
            return  # what else ends now was told to
        elif kind == Answer.WORKERS_ENDED:
            self.post.send(COORDINATOR, "workers-ended", (self.rank, payload[0]))
        elif kind == Answer.WORKER_FAILED:
            self._say(
                f"worker {payload[0]} on {self.joined.host} is given up: {payload[1]}; the rest goes on"
            )
        elif kind == Answer.SCHEDULER_ENDED:
            # Code 0: a client called shutdown().
            lost = None if payload[0] == 0 else f"the scheduler's process ended (exit code {payload[0]})"
            self._tell_over(lost)
        elif kind == Answer.LOST:
            text = f"the agent of rank {self.rank} on {self.joined.host} ended ({payload[0]})"
            self.robbed = payload[1]
            if self.robbed and not self.joined.has_scheduler:
                self._tell_over(text)
            elif self.joined.has_scheduler:
                self._tell_over(f"{text}, and the scheduler with it")
            else:
                self._agent_lost(text)
        elif kind == Answer.PREPARED and self.post.agent is not None:
            self._hire(self.post.agent.scratch or "")
        elif kind == Answer.FAILED and self._restarts.tried:
            self.post.drop_agent(0.5)
            self._agent_lost(f"the new agent of rank {self.rank} on {self.joined.host} failed ({payload[0]})")

    def _agent_lost(self, text: str) -> None:
        """An agent without the scheduler has died, and its workers with it: start another, or give this rank up."""
        if not self.joined.start.workers:
            return
        delay = self._restarts.next_delay()
        if delay is None:
            self._say(f"{text}; rank {self.rank} is given up, the rest goes on")
            self.post.send(COORDINATOR, "workers-ended", (self.rank, True))
            return
        self._say(f"{text}; it is started again in {delay:g} s")
        self._restart_at = time.monotonic() + delay

    def _restart(self) -> None:
        """Start another agent; once it has said ``prepared``, it gets its workers (`_hire`)."""
        self._restart_at = None
        try:
            self.post.agent = start_agent(self.joined.options, self.joined.environ, again=True)
        except OSError as error:  # no descriptors, no memory: perhaps later
            self._agent_lost(
                f"the agent of rank {self.rank} on {self.joined.host} could not be started ({error.strerror})"
            )
            return
        self.post.agent.configure(configuration(self.joined.options, speaks=False))
        self.post.agent.send(Order.JOINED)

    def _hire(self, scratch: str) -> None:
        start = self.joined.start
        assert self.post.agent is not None  # it has just spoken
        settings = worker_settings(self.joined.options, start, scratch)
        self.post.agent.send(Order.START_WORKERS, (settings, start.workers, start.config))

    def _say(self, text: str) -> None:
        say(text)

    def _tell_over(self, lost: str | None) -> None:
        self.post.send(COORDINATOR, "over", (0 if lost is None else 1, False, lost))

    # -- on the coordinator -------------------------------------------------------------------------------------

    def _on_workers_ended(self, rank: int, failed: bool) -> None:
        """All workers of a rank have ended, and not because we ended them."""
        self._without_workers[rank] = failed
        plan = self.joined.go.plan
        assert plan is not None  # the coordinator has it
        if not set(self._without_workers) >= {worker.rank for worker in plan.workers}:
            return
        if any(self._without_workers.values()):
            self._over(1, False, "no worker is left")
        elif self.joined.joins:
            # Its owner has shut the cluster down. In one of our own, the scheduler's end is what counts.
            self._over(0, False)

    def _over(self, code: int, final: bool, lost: str | None = None) -> None:
        """The cluster is over; `final`: the script has ended as well."""
        if lost is not None and not self.stopped:
            self.lost = lost
            say(f"error: {lost}: the cluster is lost")
        if not self._has_client or final:
            if self.ended is None:
                self.post.mailbox.send_all("end", 0)
                self.ended = code
        elif not self.stopped:
            self.post.mailbox.send_all("stop", lost)
            self._scattered = True
        self.stopped = True

    # -- ranks without the script -------------------------------------------------------------------------------

    def serve(self) -> int:
        """Wait, politely, until the job ends; what every rank does that does not run the script.

        Returns
        -------
        int
            Exit code of this rank.

        Raises
        ------
        ClusterLostError
            On the coordinator, without a script: the scheduler was lost.
        """
        signals = self.signals
        try:
            while self.ended is None:
                self.pump(CALM)
                if self.stopped:
                    self._wind_down()
                    if self.leave_open:
                        self._leave_a_mark()
                        self._part()
                        return 0
                if signals.got is not None and self._leaves_on(*signals.got):
                    break
                if self.launcher_gone():
                    self.post.drop_agent(self.joined.options.shutdown_timeout)
                    os._exit(1)  # without a launcher MPI can't be left in an orderly way
            self.leave()
            self._part()
        finally:
            signals.give_back()
        if self.lost is not None:
            raise ClusterLostError(self.lost, reported=True)
        if self.ended is not None:
            return self.ended
        return 128 + signals.got[0] if signals.got is not None else 1

    def _leaves_on(self, number: int, since: float) -> bool:
        """Whether this rank is to leave now, of itself, because of a signal."""
        if not self._has_client and self.rank == COORDINATOR:
            self._over(128 + number, final=True)
            return False
        # With a script the client rank gets the signal too: it says that its `finally` runs, and later that it is done.
        return not self._patient and time.monotonic() > since + TERM_GRACE

    def launcher_gone(self) -> bool:
        """Whether the launcher that started this rank has died."""
        return self._launched and os.getppid() != self._parent

    # -- the end ------------------------------------------------------------------------------------------------

    def client_done(self, *, final: bool) -> None:
        """The script has ended, or closed its session: end the cluster everywhere.

        Parameters
        ----------
        final : bool
            False when the script goes on without the cluster.
        """
        if self.rank == COORDINATOR:
            self._over(0, final)
        elif self.ended is None and not (self._scattered and self.leave_open):  # else nobody listens any more
            self.post.send(COORDINATOR, "over", (0, final, None))
            limit = time.monotonic() + self.joined.options.shutdown_timeout
            while self.ended is None and not (self.stopped and not final) and time.monotonic() < limit:
                self.pump(BRISK)
        self.leave()
        if final:
            self._part()

    def _part(self) -> None:
        """The program goes on without the cluster on all ranks: give back what MPI holds for it."""
        if self.leave_open and self.ended is not None and not self._scattered:
            self.post.mailbox.free(PARTING, self.joined.options.shutdown_timeout + PARTING)

    def leave(self) -> None:
        """Close what is open here, and let the last messages out.

        Where a rank does not answer, MPI would wait for it for ever: then the job is aborted here, with a line that says so.
        """
        long_ago = self._wound_down
        self._wind_down()
        if long_ago and self.ended is not None and self.rank == COORDINATOR:
            # Who has not answered is the client rank, perhaps: where the cluster had ended before its script, it has only now
            # come to its end.
            limit = time.monotonic() + self.joined.options.shutdown_timeout + 1.0
            while not self._closed.issuperset(self.silent) and time.monotonic() < limit:
                self.pump(BRISK)
            self.silent = [rank for rank in self.silent if rank not in self._closed]
        flushed = self.post.mailbox.flush(2.0)
        if self.joined.options.timeline is not None and not long_ago:
            self.pump(0.0)  # what this rank has told itself, and what others have told last
            self.write_timeline()
        if self.ended is not None and self.rank == COORDINATOR and (self.silent or not flushed):
            names = ranks_text(self.silent) if self.silent else "a rank"
            self._say(f"{names} of {self.post.size} did not answer at the end: the job is aborted")
            abort(self.ended or 1)
        else:
            self._leave_a_mark()

    def _leave_a_mark(self) -> None:
        """Say in the log directory that the job has come to its end.

        Open MPI 5's ``mpirun`` ends with code 0 when it has lost a daemon of its own below Slurm: a job script could not tell.
        """
        if self._mark is not None and self.ended is not None:
            with contextlib.suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()

    def _wind_down(self) -> None:
        """Close workers everywhere, then the scheduler: a worker that loses its scheduler first has much to say about it."""
        if self._wound_down:
            return
        self._wound_down = True
        self.joined.timeline.lap("the script" if self.joined.start.is_client else "serve")
        options, post = self.joined.options, self.post
        if self.joined.scheduler_file is not None:
            # First: a launcher may leave half a second. (The agent removes it as well, if this process does not get so far.)
            remove_scheduler_file(*self.joined.scheduler_file)
        own = time.monotonic() + grace(options) + 1.0
        if post.agent is not None:
            post.agent.send(Order.CLOSE_WORKERS)
            while not self._told_closed and post.agent is not None and time.monotonic() < own:
                self.pump(BRISK)
        if not self._told_closed:
            if post.agent is not None:
                post.agent.kill()
            self._tell_closed()
        # From here on this rank is busy: to remove what its workers have spilled may take long.
        post.mailbox.flush(1.0)
        if not self.joined.has_scheduler or not self._told_closed:
            self._end_agent()
            self.joined.timeline.lap("close the agent")
        # The others take as long as this rank, and the messages some time; this rank hears them also where it was slow itself.
        limit = max(own, time.monotonic()) + max(CLOSING_SLACK, CLOSING_PART * options.shutdown_timeout)
        plan = self.joined.go.plan
        if self.rank == COORDINATOR and plan is not None:
            while len(self._closed) < post.size and time.monotonic() < limit:
                self.pump(BRISK)
            self.joined.timeline.lap("wait for the ranks")
            self.silent = [rank for rank in range(post.size) if rank not in self._closed]
            post.send(plan.scheduler.rank, "release")
        if self.joined.has_scheduler:
            while not self._released and post.agent is not None and time.monotonic() < limit + 1.0:
                self.pump(BRISK)
            self._end_agent()
            self.joined.timeline.lap("close the scheduler")
        self._end_agent()
        self._tell_closed()  # also when its agent could not say so any more

    def _end_agent(self) -> None:
        """End this rank's agent and remove its scratch, within the deadline; what is left then is reported."""
        timeout = self.joined.options.shutdown_timeout
        limit = time.monotonic() + timeout
        self.post.drop_agent(timeout)
        left, self.post.left = self.post.left, []
        for path in left:  # of agents that were lost before, too
            remove_scratch(path, within=limit - time.monotonic())
            if os.path.exists(path):
                self._say(
                    f"warning: rank {self.rank} on {self.joined.host}: could not remove all of {path} within {timeout:g} s "
                    "(shutdown_timeout). Fix: remove it, and set a faster local_directory or a longer shutdown_timeout"
                )

    def _tell_closed(self) -> None:
        """Tell the coordinator that this rank's workers have closed, and what it has done since it was ready."""
        steps = self.joined.timeline.take() if self.joined.options.timeline is not None else []
        self.post.send(COORDINATOR, "closed", (self.rank, steps))

    def write_timeline(self) -> None:
        """Write what the coordinator knows of the timeline, where the user wants it."""
        path = self.joined.options.timeline
        if path is None or self.rank != COORDINATOR:
            return
        try:
            write(path, self.joined.hosts, self.joined.steps)
        except OSError as error:  # no reason to end a job that works
            self._say(f"warning: the timeline {path!r} could not be written: {error.strerror}")


class _Restarts:
    """How often an agent is started again, and after how long."""

    #: Seconds before each.
    DELAYS = (0.5, 2.0, 8.0)

    def __init__(self) -> None:
        self.tried = 0

    def next_delay(self) -> float | None:
        """Seconds to wait before the next try; None when there is none."""
        if self.tried == len(self.DELAYS):
            return None
        self.tried += 1
        return self.DELAYS[self.tried - 1]
