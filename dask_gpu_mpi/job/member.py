"""One rank of a running cluster, until the job ends.

Nothing here waits in a call that can't be interrupted; every wait has a deadline; and whichever way the rank leaves, its agent
has ended by then.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from dask_gpu_mpi.agent.orders import Answer
from dask_gpu_mpi.base.signals import is_ours
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.agent_restarts import AgentRestarts
from dask_gpu_mpi.job.end_coordinator import Closing, EndCoordinator
from dask_gpu_mpi.job.ending import Cause, Ending, EndKind, State
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR, POLL_BUSY, POLL_IDLE

__all__ = ["Member"]

#: Seconds for all ranks to come to an orderly end, where the program continues.
FREE_TIMEOUT = 3.0
#: Seconds that a rank continues after SIGTERM, for the script's `finally` on the client rank.
TERM_GRACE = 5.0
#: Seconds for the last messages to get out.
FLUSHING = 2.0


class Member:
    """A rank of a cluster that is up.

    Parameters
    ----------
    joined : Joined
        How it joined.
    signals : Signals
        Taken before it joined.
    leave_open : bool
        ``exit=False``: the rank continues with work of its own when the cluster stops.
    has_client : bool
        Whether some rank runs a script.
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
        self._closing = Closing(joined, self.ending, self.coordinator, self.pump_until)
        self._restarts = AgentRestarts(joined)
        #: The script has closed our descriptors, and those of MPI, which can't be left in an orderly way any more.
        self.descriptors_lost = False
        #: Set by the script's SIGTERM handler; sent to the others by the next `pump`, since a handler must not touch messages.
        self.busy = False
        #: The script's `finally` runs: no rank leaves by itself because of a signal.
        self._script_is_busy = False
        #: On the client rank: the signal that another rank was sent, until the script has it too (`Monitor`).
        self.signal_elsewhere: int | None = None
        #: On the client rank: the job's own scheduler has had a client, of any process.
        self.had_client = False
        #: This rank has reported the signal that it was sent.
        self._signal_reported = False
        self._has_client = has_client
        self._parent = os.getppid()
        self._launched = launchers.detect(joined.environ) is not None
        self._lock = threading.Lock()

    # -- while it runs ------------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> None:
        """Handle what has happened; waits at most `timeout` seconds for it."""
        with self._lock:
            if not self.ending.state.over:
                self._restarts.start_if_due()
            if self.busy:
                self.busy = False
                self.channels.send(COORDINATOR, EndKind.BUSY)
            for event in self.channels.events(timeout):
                if event.source is None:
                    self._on_agent(event.kind, event.payload)
                else:
                    self._on_mail(event.kind, event.payload)

    def pump_until(self, done: Callable[[], bool], limit: float) -> None:
        """Handle what happens until `done()`, or until `limit` (``time.monotonic()``)."""
        while not done() and time.monotonic() < limit:
            self.pump(POLL_BUSY)

    def _on_mail(self, kind: str, payload: Any) -> None:
        if kind == EndKind.STOP:
            self.ending.on(Cause.STOP)
            if self.joined.start.is_client:
                self.ending.lost = payload  # for the script; rank 0 has printed it
        elif kind == EndKind.END:
            self.ending.code = payload
            self.ending.on(Cause.END)
        elif kind == EndKind.RELEASE:
            self._closing.release()
        elif kind == EndKind.BUSY:
            self._script_is_busy = True
            if self.coordinator is not None:
                self.channels.mailbox.send_all(EndKind.BUSY)
        elif kind == EndKind.SIGNAL and self.joined.start.is_client and self._has_client:
            self.signal_elsewhere = payload
        elif kind == EndKind.CLIENT and self.joined.start.is_client:
            self.had_client = True
        elif self.coordinator is not None:
            self.coordinator.on_message(kind, payload)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        here = f"rank {self.rank} on {self.joined.host}"
        if kind == Answer.WORKERS_CLOSED:
            self._closing.workers_closed()
        elif self.ending.state.over:
            return  # all else that ends now was ordered to
        elif kind == Answer.CLIENT:
            self.channels.send(COORDINATOR, EndKind.CLIENT)
        elif kind == Answer.WORKERS_ENDED:
            failed = payload[0] or self._restarts.failed  # of an agent before this one
            self.channels.send(COORDINATOR, EndKind.WORKERS_ENDED, (self.rank, failed))
        elif kind == Answer.WORKER_ENDED:
            name, why = payload
            self._restarts.worker_ended(name, why)
            if why is not None:
                say(f"worker {name} on {self.joined.host} removed: {why}; continuing with the other workers")
        elif kind == Answer.SCHEDULER_ENDED:
            # Code 0: a client called shutdown().
            self._report_over(
                None if payload[0] == 0 else f"the scheduler's process ended (exit code {payload[0]})"
            )
        elif kind == Answer.LOST:
            text = f"the agent of {here} ended ({payload[0]})"
            self.descriptors_lost = payload[1]
            if self.joined.has_scheduler:
                self._report_over(f"{text}, and the scheduler with it")
            elif self.descriptors_lost:
                self._report_over(text)
            else:
                self._restarts.lost(text)
        elif kind == Answer.PREPARED:
            self._restarts.start_workers()
        elif kind == Answer.FAILED and self._restarts.tried:
            self.channels.drop_agent(0.5)
            self._restarts.lost(f"the new agent of {here} failed ({payload[0]})")

    def _report_over(self, lost: str | None, *, final: bool = False, code: int = 0) -> None:
        self.channels.send(COORDINATOR, EndKind.OVER, (final, lost, code))

    def launcher_gone(self) -> bool:
        """Whether the launcher that started this rank has died."""
        return self._launched and os.getppid() != self._parent

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
        ending, signals = self.ending, self.signals
        try:
            while self._is_awaited:
                self.pump(POLL_IDLE)
                if ending.state.stopped and not self.leave_open:
                    self.leave()  # the script continues, maybe for long
                if signals.got is not None and self._leaves_on(*signals.got):
                    break
                if self.launcher_gone():
                    self.channels.drop_agent(self.joined.options.shutdown_timeout)
                    os._exit(outcome.FAILED)  # without a launcher MPI can't be left in an orderly way
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
        """Whether rank 0 still has to report an end: a program that continues without the cluster hears of no second one."""
        return not self.ending.state.ended and not (self.ending.state.stopped and self.leave_open)

    def _leaves_on(self, number: int, since: float) -> bool:
        """Report the signal to rank 0, which ends the job; True where this rank is to leave by itself, since nobody does."""
        if not self._signal_reported:
            self._signal_reported = True
            self.channels.send(COORDINATOR, EndKind.SIGNAL, number)
        # A client rank whose `finally` runs reports that, and later its end.
        return not self._script_is_busy and time.monotonic() > since + TERM_GRACE

    # -- the end ------------------------------------------------------------------------------------------------

    def client_done(self, *, final: bool, code: int = 0) -> None:
        """The script has ended, or closed its session: end the cluster everywhere.

        Parameters
        ----------
        final : bool
            False when the script continues without the cluster.
        code : int
            What it exits with, as far as that is known: for a job that has to be aborted.
        """
        ending = self.ending
        if self.coordinator is not None:
            self.coordinator.end_cluster(final=final, code=code)
        elif self._is_awaited:  # else no rank waits for it any more
            self._report_over(None, final=final, code=code)
            limit = time.monotonic() + self.joined.options.shutdown_timeout
            self.pump_until(lambda: ending.state.ended if final else ending.state.over, limit)
        self.leave()
        if final:
            self._free_communicator(failed=sys.exception() is not None or outcome.failure() is not None)

    def leave(self) -> None:
        """Close what is open here, and let the last messages out."""
        ending, coordinator, options = self.ending, self.coordinator, self.joined.options
        closed_before = ending.state.closed
        self._closing.run()
        if closed_before and ending.state.ended and coordinator is not None:
            # Who has not answered is the client rank, perhaps: where the cluster had ended before its script, it has only now
            # come to its end.
            self.pump_until(lambda: not coordinator.silent, time.monotonic() + options.shutdown_timeout + 1.0)
        flushed = self.channels.mailbox.flush(FLUSHING)
        if coordinator is not None and ending.state.ended:
            coordinator.finish(flushed=flushed)

    def _free_communicator(self, *, failed: bool) -> None:
        """The program continues without the cluster on all ranks: free what MPI holds for it.

        Not where this rank has failed: then it ends perhaps, and needs to know whether the others do.
        """
        if not self.leave_open:
            return
        mailbox = self.channels.mailbox
        raised = sys.exception()
        exits = outcome.outcome_of_error(raised)[1] if isinstance(raised, SystemExit) else None
        mailbox.failure = functools.partial(outcome.failure, exits)
        if self.ending.state in (State.ENDING, State.CLOSED):
            patience = self.joined.options.shutdown_timeout + FREE_TIMEOUT
            mailbox.free(FREE_TIMEOUT, patience, agrees=not failed)
