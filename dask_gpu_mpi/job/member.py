"""One rank of a running cluster, until the job ends.

No wait here is in a call that can't be interrupted. Every wait has a deadline. In whatever way the rank leaves, its agent ends
before.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer, Order
from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.signals import Signals, is_ours
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeouts import (
    FAILED_GRACE,
    FLUSH,
    FREE_TIMEOUT,
    RANK_0_LOST,
    RANK_0_SILENT,
    TERM_GRACE,
)
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.ending import BEATS_PER_SECOND, Closing, EndCoordinator, Ending, EndKind, beat_interval
from dask_gpu_mpi.mpi.library import is_open_mpi
from dask_gpu_mpi.network.interfaces import host_and_port
from dask_gpu_mpi.network.reachability import connect_only
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR, POLL_BUSY, POLL_IDLE, Channels

#: Seconds before each restart of an agent that has died; after the last its rank is removed.
DELAYS = (0.5, 2.0, 8.0)


class SignalRelay:
    """The way of a signal through the job: from the rank that was sent it, through rank 0, to the script, which ends the job.

    A rank without the script reports its signal once. It leaves by itself if the job has not ended after `TERM_GRACE`, unless
    the script is still cleaning up, which the client rank announces to all.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._reported = False
        self._script_cleans_up = False
        self._announcement_is_due = False
        #: On the client rank: the signal that another rank was sent, until `Monitor` has passed it to the script.
        self.for_script: int | None = None

    def script_is_interrupted(self) -> None:
        """Announce, at the next `pump`, that the script runs its `finally`; called in signal handlers, which can't send."""
        self._announcement_is_due = True

    def pump(self) -> None:
        """Send the announcement that is due."""
        if self._announcement_is_due:
            self._announcement_is_due = False
            self._channels.send(COORDINATOR, EndKind.BUSY)

    def on_announcement(self) -> None:
        """The script runs its `finally`; the client rank reports its end later."""
        self._script_cleans_up = True
        if self._channels.rank == COORDINATOR:
            self._channels.mailbox.send_all(EndKind.BUSY)

    def leaves(self, number: int, since: float) -> bool:
        """Report this rank's signal, which came at `since`; returns whether the rank has to leave without an answer."""
        if not self._reported:
            self._reported = True
            self._channels.send(COORDINATOR, EndKind.SIGNAL, number)
        return not self._script_cleans_up and time.monotonic() > since + TERM_GRACE


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
        """Handle the death of the agent and its workers: start another, or remove this rank."""
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
            agent = AgentProcess(joined.environ)
        except OSError as error:  # no descriptors, no memory: perhaps later
            self.lost(
                f"the agent of rank {self._channels.rank} on {joined.host} could not be started ({error.strerror})"
            )
            return
        self._channels.agent = agent
        agent.begin(joined.options, joined.environ, inspect_gpus=False)
        agent.configure(joined.options, speaks=False)
        agent.send(Order.JOINED)

    def start_workers(self) -> None:
        """Give the new agent this rank's workers."""
        self._channels.order(Order.START_WORKERS, replace(self._joined.start, workers=self._workers))


class CoordinatorWatch:
    """Detects on another rank that rank 0 is lost: launchers that let the job survive lost ranks do not report that.

    Rank 0 is also silent while its script blocks the interpreter, and under MPICH. Then its scheduler, another process, still
    listens.
    """

    def __init__(self, address: str, size: int) -> None:
        #: Seconds between two connections to the scheduler: to which all ranks connect, but not all at once.
        self._patience = max(RANK_0_LOST, size / BEATS_PER_SECOND) * random.uniform(1.0, 1.5)
        self._scheduler = host_and_port(address.rpartition("://")[2])
        #: When the last message of rank 0 came (``time.monotonic()``).
        self._heard = time.monotonic()
        #: Nobody refuses a connection to the scheduler: the node of rank 0 is down, or only the network of this one.
        self.unreachable = False

    def hear(self) -> None:
        """Note a message of rank 0."""
        self._heard = time.monotonic()

    def is_lost(self, *, has_scheduler: bool) -> bool:
        """Whether rank 0 is gone; `has_scheduler`: its scheduler has not been closed."""
        silence = time.monotonic() - self._heard
        if silence < self._patience:
            return False
        if not has_scheduler:
            return silence > RANK_0_SILENT
        if not (error := connect_only(*self._scheduler)):
            self.hear()
        self.unreachable = error != os.strerror(errno.ECONNREFUSED)
        # a network may be down for some seconds
        return bool(error) and (not self.unreachable or silence > self._patience + RANK_0_LOST)


class Member:
    """A rank of a cluster that is up; `signals` were taken before it joined.

    With `leave_open` (``exit=False``) the program continues on this rank when the cluster stops. `has_client`: some rank runs a
    script.
    """

    def __init__(self, joined: Joined, signals: Signals, *, leave_open: bool, has_client: bool) -> None:
        self.joined = joined
        self.signals = signals
        self.channels = joined.channels
        self.rank = joined.channels.rank
        self.leave_open = leave_open
        self.ending = Ending()
        #: On rank 0.
        self.coordinator: EndCoordinator | None = None
        if self.rank == COORDINATOR:
            self.coordinator = EndCoordinator(joined, self.ending, has_client=has_client)
        self.signal_relay = SignalRelay(joined.channels)
        #: When to send `EndKind.ALIVE` (``time.monotonic()``).
        self._beat_due = math.inf
        #: On the other ranks, if ranks may be lost.
        self._coordinator_watch: CoordinatorWatch | None = None
        if joined.options.tolerate_lost_ranks:
            joined.channels.mailbox.tolerates_loss = True
            self._beat_due = 0.0
            if self.rank != COORDINATOR:
                self._coordinator_watch = CoordinatorWatch(joined.start.address, joined.channels.size)
        self._closing = Closing(joined, self.ending, self.coordinator, self.pump_until)
        self._restarts = AgentRestarts(joined)
        #: The script has closed the descriptors of this package, and those of MPI, so that MPI can't be left in an orderly way.
        self.descriptors_lost = False
        #: On the client rank: the job's own scheduler has had a client, of any process.
        self.had_client = False
        self._has_client = has_client
        self._parent = os.getppid()
        self._launched = launchers.detect(joined.environ) is not None
        self._lock = threading.Lock()

    # -- while it runs ------------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> None:
        """Handle what has happened; waits at most `timeout` seconds for it."""
        with self._lock:
            if not self.ending.over:
                self._restarts.start_if_due()
            self.signal_relay.pump()
            if time.monotonic() > self._beat_due:
                self._beat_due = time.monotonic() + beat_interval(self.channels.size)
                self._beat()
            for event in self.channels.events(timeout):
                if event.source is None:
                    self._on_agent(event.kind, event.payload)
                else:
                    self._on_mail(event.kind, event.payload)

    def _beat(self) -> None:
        """Send that this rank is alive. Of rank 0 its scheduler shows that too, where a message to a dead rank would end it."""
        if self.rank != COORDINATOR:
            self.channels.send(COORDINATOR, EndKind.ALIVE, self.rank)
        elif self.ending.over or is_open_mpi():  # MPICH ends with signal 11
            self.channels.mailbox.send_all(EndKind.ALIVE, self.rank)

    def pump_until(self, done: Callable[[], bool], limit: float) -> None:
        """Handle what happens until `done()`, or until `limit` (``time.monotonic()``)."""
        while not done() and time.monotonic() < limit:
            self.pump(POLL_BUSY)

    def _on_mail(self, kind: str, payload: Any) -> None:
        is_client = self.joined.start.is_client
        match kind:
            case EndKind.ALIVE if self._coordinator_watch is not None:
                self._coordinator_watch.hear()
            case EndKind.STOP:
                self.ending.stopped = True
                if is_client:
                    self.ending.lost = payload  # for the script; rank 0 has printed it
            case EndKind.END:
                self.ending.code = payload
                self.ending.ended = True
            case EndKind.RELEASE:
                self._closing.release()
            case EndKind.BUSY:
                self.signal_relay.on_announcement()
            case EndKind.SIGNAL if is_client and self._has_client:
                self.signal_relay.for_script = payload
            case EndKind.CLIENT if is_client:
                self.had_client = True
            case _ if self.coordinator is not None:
                self.coordinator.on_message(kind, payload)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        if kind != Answer.WORKERS_CLOSED and self.ending.over:
            return  # all other ends were ordered
        here = f"rank {self.rank} on {self.joined.host}"
        match kind:
            case Answer.WORKERS_CLOSED:
                self._closing.workers_closed()
            case Answer.CLIENT:
                self.channels.send(COORDINATOR, EndKind.CLIENT)
            case Answer.UNREACHABLE if self.coordinator is not None:
                self.coordinator.on_unreachable(payload[0])
            case Answer.WORKERS_ENDED:
                failed = payload[0] or self._restarts.failed  # of an agent before this one
                self.channels.send(COORDINATOR, EndKind.WORKERS_ENDED, (self.rank, failed))
            case Answer.WORKER_ENDED:
                name, why = payload
                self._restarts.worker_ended(name, why)
                if why is not None:
                    say(
                        f"worker {name} on {self.joined.host} removed: {why}; continuing with the other workers"
                    )
            case Answer.SCHEDULER_ENDED:
                # Code 0: a client called shutdown().
                code = payload[0]
                self._report_over(None if code == 0 else f"the scheduler's process ended (exit code {code})")
            case Answer.LOST:
                why, self.descriptors_lost = payload
                text = f"the agent of {here} ended ({why})"
                if self.joined.has_scheduler:
                    self._report_over(f"{text}, and the scheduler with it")
                elif self.descriptors_lost:
                    self._report_over(text)
                else:
                    self._restarts.lost(text)
            case Answer.PREPARED:
                self._restarts.start_workers()
            case Answer.FAILED if (
                not self.joined.has_scheduler
            ):  # another agent, or one for which the start did not wait
                self.channels.drop_agent(0.5)
                self._restarts.lost(f"the agent of {here} failed ({payload[0]})")

    def _report_over(self, lost: str | None, *, final: bool = False, code: int = 0) -> None:
        self.channels.send(COORDINATOR, EndKind.OVER, (final, lost, code))

    def launcher_gone(self) -> bool:
        """Whether the launcher that started this rank has died."""
        return self._launched and os.getppid() != self._parent

    def _leave_without_coordinator(self, *, alone: bool) -> None:
        """End this rank alone, since rank 0 can no longer end it. `alone`: the other ranks may continue."""
        if (
            self.rank <= 1 + self.joined.options.tolerate_lost_ranks
        ):  # one line is enough, and that many ranks may be lost
            say(
                f"error: rank 0 lost, and with it the script and the scheduler ({self.joined.start.address}): its processes or "
                "its node died, or its network is down. Fix: inspect that node, and the log file of the rank (--log-directory)"
            )
            wait_until_read((1, 2), FAILED_GRACE)
        else:  # the launcher may end with the first
            time.sleep(FAILED_GRACE)
        self.channels.drop_agent(self.joined.options.shutdown_timeout)
        if alone:  # as if it had died: a job that continues without this rank would end with its code
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(outcome.FAILED)

    # -- ranks without the script -------------------------------------------------------------------------------

    def serve(self) -> int:
        """Wait until the job ends, on a rank without the script, and return its exit code.

        Raises a ClusterLostError on rank 0 of a job without a script if the scheduler was lost.
        """
        ending, signals = self.ending, self.signals
        try:
            while self._is_awaited:
                self.pump(POLL_IDLE)
                if ending.stopped and not self.leave_open:
                    self.leave()  # the script continues, maybe for long
                if signals.got is not None and self.signal_relay.leaves(*signals.got):
                    break
                if self.launcher_gone():
                    self.channels.drop_agent(self.joined.options.shutdown_timeout)
                    os._exit(outcome.FAILED)  # without a launcher MPI can't be left in an orderly way
                watch = self._coordinator_watch
                if watch is not None and watch.is_lost(has_scheduler=not ending.over):
                    self._leave_without_coordinator(alone=watch.unreachable)
            self.leave()
            number = signals.got[0] if signals.got is not None else ending.signal
            self._free_communicator(failed=number is not None)
        finally:
            signals.give_back()
        if ending.lost is not None and not (self.leave_open and self._has_client):
            raise ClusterLostError(ending.lost, reported=True)
        if not self.leave_open:
            return ending.exit_code(None if signals.got is None else signals.got[0])
        if number is not None:
            # The program would continue as if nothing had happened, and wait in MPI for ranks that the signal has ended.
            if ending.code and is_ours(number):
                raise SystemExit(ending.code)  # as the script: 75 after its checkpoint
            signal.raise_signal(number)
        return 0

    @property
    def _is_awaited(self) -> bool:
        """Whether rank 0 still has to report an end: a program that continues without the cluster gets no second report."""
        return not self.ending.ended and not (self.ending.stopped and self.leave_open)

    # -- the end ------------------------------------------------------------------------------------------------

    def client_done(self, *, final: bool, code: int = 0) -> None:
        """End the cluster on all ranks: the script has ended (`final`), or has closed its session.

        `code`: the script's exit code, as far as it is known, for a job that has to be aborted.
        """
        ending = self.ending
        if self.coordinator is not None:
            self.coordinator.end_cluster(final=final, code=code)
        elif self._is_awaited:  # else no rank waits for it any more
            self._report_over(None, final=final, code=code)
            limit = time.monotonic() + self.joined.options.shutdown_timeout
            self.pump_until(lambda: ending.ended if final else ending.over, limit)
        self.leave()
        if final:
            self._free_communicator(failed=sys.exception() is not None or outcome.failure() is not None)

    def leave(self) -> None:
        """Close this rank's part, and send the last messages."""
        ending, coordinator, options = self.ending, self.coordinator, self.joined.options
        closed_before = ending.closed
        self._closing.run()
        if closed_before and ending.ended and coordinator is not None:
            # The silent rank may be the client's: if the cluster ended before its script, it ends only now.
            self.pump_until(lambda: not coordinator.silent, time.monotonic() + options.shutdown_timeout + 1.0)
        flushed = self.channels.mailbox.flush(FLUSH)
        if coordinator is not None and ending.ended:
            coordinator.finish(flushed=flushed, final=not self.leave_open)

    def _free_communicator(self, *, failed: bool) -> None:
        """Free the cluster's communicator, if the program continues without it on all ranks.

        A rank that has failed does not agree, since it may end, and then has to find out whether the others do.
        """
        if not self.leave_open:
            return
        mailbox = self.channels.mailbox
        raised = sys.exception()
        exits = outcome.outcome_of_error(raised)[1] if isinstance(raised, SystemExit) else None
        mailbox.failure = functools.partial(outcome.failure, exits)
        if self.ending.ended and not self.ending.stopped:
            patience = self.joined.options.shutdown_timeout + FREE_TIMEOUT
            mailbox.free(FREE_TIMEOUT, patience, agrees=not failed)
