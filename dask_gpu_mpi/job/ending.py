"""The end of the cluster: its messages, how far a rank has come, how it closes its part, and how rank 0 leads the end of all."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.files import open_to_append, remove
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted, ranks_text
from dask_gpu_mpi.base.timeouts import CLOSING_SHARE, CLOSING_SLACK
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.machine.nvidia import closing_time
from dask_gpu_mpi.machine.scratch import remove_scratch
from dask_gpu_mpi.mpi.finalize import do_not_finalize
from dask_gpu_mpi.mpi.library import abort, end_lost_ranks, leave_as_the_last
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.startup.messages import COORDINATOR


class EndKind(StrEnum):
    """Kinds of messages between ranks from the start of the script until the end, each with sender, receivers and payload."""

    #: Rank 0 to all: the cluster is over, the script continues. How the cluster was lost; None: it was closed.
    STOP = "stop"
    #: Rank 0 to all: the job ends. The exit code of the script, as far as it is known.
    END = "end"
    #: Rank 0 to the scheduler's rank: all workers have closed, the scheduler may close.
    RELEASE = "release"
    #: Client rank to rank 0, rank 0 to all: the script runs its `finally` after a signal.
    BUSY = "busy"
    #: The scheduler's rank to rank 0, which passes it on to the client rank: the scheduler has had a client.
    CLIENT = "client"
    #: Every rank to rank 0: its own number; its workers have closed.
    CLOSED = "closed"
    #: Any rank to rank 0: ``(final, lost, code)``, the cluster is over. `final`: the script has ended too; `lost`: how the
    #: cluster was lost; `code`: the script's exit code, as far as it is known.
    OVER = "over"
    #: Every rank to rank 0, and (not under MPICH) rank 0 to all, from time to time, if ranks may be lost: its own number.
    ALIVE = "alive"
    #: Any rank to rank 0: ``(rank, failed)``, all its workers have ended by themselves; whether one of them failed.
    WORKERS_ENDED = "workers-ended"
    #: Any rank without the script to rank 0, which passes it on to the client rank: the number of the signal that it was sent.
    SIGNAL = "signal"


#: The type of each kind's payload.
PAYLOADS: Mapping[str, Any] = {
    EndKind.STOP: str | None,
    EndKind.END: int,
    EndKind.RELEASE: None,
    EndKind.BUSY: None,
    EndKind.CLIENT: None,
    EndKind.CLOSED: int,
    EndKind.ALIVE: int,
    EndKind.OVER: tuple[bool, str | None, int],
    EndKind.WORKERS_ENDED: tuple[int, bool],
    EndKind.SIGNAL: int,
}


#: Least seconds between two `ALIVE` of a rank, and the most that come to rank 0 in a second; so with connections to it.
BEAT, BEATS_PER_SECOND = 2.0, 100


def beat_interval(size: int) -> float:
    """Seconds between two `ALIVE` of each of so many ranks."""
    return max(BEAT, size / BEATS_PER_SECOND)


class Ending:
    """How far the end of one rank has come, and why its cluster ends. What has happened stays so."""

    def __init__(self) -> None:
        #: The cluster was over before its script: by ``close()``, ``shutdown()``, or a lost scheduler.
        self.stopped = False
        #: The job ends.
        self.ended = False
        #: This rank has begun to close its part: workers, agent, scheduler.
        self.closed = False
        #: How the cluster was lost, if it was, on the ranks that report it: rank 0 and the client's.
        self.lost: str | None = None
        #: The signal that ends the job, if one does: of a job without a script.
        self.signal: int | None = None
        #: The exit code of the script, as far as it is known.
        self.code = 0

    @property
    def over(self) -> bool:
        """Whether the cluster is over."""
        return self.stopped or self.ended

    def exit_code(self, received: int | None = None) -> int:
        """The exit code of a rank without the script.

        `received`: the first signal that this rank was sent, which counts if the rank leaves by itself.

        >>> Ending().exit_code(15)
        143
        """
        if self.lost is not None:
            return outcome.FAILED
        number = self.signal if self.ended else received
        if number is not None:
            return outcome.code_of_signal(number)
        return 0 if self.ended else outcome.FAILED


#: A rank is lost if no message of it has come for so many intervals, and its agent doesn't answer.
BEATS_MISSED = 2.5


class Closing:
    """Closes one rank's part, once: first the workers of all ranks, then the scheduler; every wait has a deadline."""

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
        """Close this rank's part: workers first, since a worker that loses its scheduler logs many errors."""
        if self._ending.closed:
            return
        self._ending.closed = True
        joined, channels = self._joined, self._channels
        if joined.scheduler_file is not None:
            # First, since a launcher may allow half a second. (The agent removes it as well, if this process does not.)
            remove_scheduler_file(*joined.scheduler_file)
        own = time.monotonic() + closing_time(joined.options, joined.environ) + 1.0
        self._close_workers(own)
        # From here on this rank is busy: the removal of spilled data may take long.
        channels.mailbox.flush(1.0)
        if not joined.has_scheduler or not self._workers_closed:
            self._end_agent()
        # The others need as long as this rank, and the messages some time; they are handled even if this rank was slow itself.
        slack = max(CLOSING_SLACK, CLOSING_SHARE * joined.options.shutdown_timeout)
        limit = max(own, time.monotonic()) + slack
        if (coordinator := self._coordinator) is not None:
            self._pump_until(lambda: not coordinator.silent, limit)
            coordinator.release_scheduler()
        if joined.has_scheduler:
            self._pump_until(lambda: self._released or channels.agent is None, limit + 1.0)
            self._end_agent()
        self._report()  # even if its agent could not report it

    def _close_workers(self, limit: float) -> None:
        """Order the agent to close its workers until `limit`, else kill it."""
        channels = self._channels
        if channels.agent is not None:
            channels.agent.send(Order.CLOSE_WORKERS)
            self._pump_until(lambda: self._workers_closed or channels.agent is None, limit)
        if not self._workers_closed:
            if channels.agent is not None:
                channels.agent.kill()
            self._report()

    def _end_agent(self) -> None:
        """End this rank's agent and remove its scratch, within the deadline; print a warning of the rest."""
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


class EndCoordinator:
    """The end, as rank 0 leads it."""

    def __init__(self, joined: Joined, ending: Ending, *, has_client: bool) -> None:
        assert joined.cluster.plan is not None  # rank 0 has it
        self._plan = joined.cluster.plan
        self._joined = joined
        self._channels = joined.channels
        self._ending = ending
        self._has_client = has_client
        #: Ranks whose workers have all ended by themselves, and whether one of them had failed.
        self._without_workers: dict[int, bool] = {}
        self._closed: set[int] = set()
        #: The lost ranks, in a job that tolerates some.
        self._lost: set[int] = set(joined.cluster.absent)
        joined.channels.mailbox.lost.update(self._lost)
        #: When the last message of each rank came.
        self._heard = dict.fromkeys(range(self._channels.size), time.monotonic())
        self._tolerated = joined.options.tolerate_lost_ranks
        directory = joined.options.log_directory
        # absolute: the script may change to another directory
        self._mark = None if directory is None else Path(directory, "ended").absolute()
        if self._mark is not None:
            with contextlib.suppress(OSError):
                remove(self._mark)  # of a job before this one

    # -- the decision -------------------------------------------------------------------------------------------

    def end_cluster(
        self, *, final: bool, lost: str | None = None, signal: int | None = None, code: int = 0
    ) -> None:
        """End the cluster on all ranks, unless it is over.

        `final`: the script has ended as well. `lost`: how the cluster was lost. `signal`: the signal that ends the job.
        `code`: the exit code of the script, as far as it is known.
        """
        ending = self._ending
        if lost is not None and not ending.over:
            ending.lost = lost
            say(
                f"error: {lost}: the cluster is lost. Fix: find out why, in the log files (--log-directory); out of memory, most "
                "often"
            )
        if final or not self._has_client:
            if not ending.ended:
                self._channels.mailbox.send_all(EndKind.END, code)
                ending.signal, ending.code = signal, code
                ending.ended = True
        elif not ending.over:
            self._channels.mailbox.send_all(EndKind.STOP, lost)
            ending.stopped = True

    def on_message(self, kind: str, payload: Any) -> None:
        """Handle a message to rank 0 alone; others are ignored."""
        match kind:
            case EndKind.CLOSED:
                self._closed.add(payload)
            case EndKind.OVER:
                final, lost, code = payload
                self.end_cluster(final=final, lost=lost, code=code)
            case EndKind.ALIVE:
                self._heard[payload] = time.monotonic()
            case EndKind.WORKERS_ENDED:
                self._on_workers_ended(*payload)
            case EndKind.SIGNAL if self._has_client:  # the script ends the job
                self._channels.send(self._plan.client.rank, EndKind.SIGNAL, payload)
            case EndKind.SIGNAL:
                self.end_cluster(final=True, signal=payload)
            case EndKind.CLIENT:
                self._channels.send(self._plan.client.rank, EndKind.CLIENT)

    def _on_workers_ended(
        self, rank: int, failed: bool, why: str = "its agent, or each of its workers, died too often"
    ) -> None:
        """All workers of a rank have ended, by themselves."""
        self._without_workers[rank] = failed
        if failed and self._tolerated and rank != COORDINATOR:
            self._lose(rank, why)
        if not set(self._without_workers) >= {worker.rank for worker in self._plan.workers}:
            return
        if any(self._without_workers.values()):
            self.end_cluster(final=False, lost="no worker is left")
        elif not self._joined.options.scheduler:
            # The owner of the cluster has shut it down. In a cluster that this job has started, the scheduler's end counts.
            self.end_cluster(final=False)

    # -- lost ranks ---------------------------------------------------------------------------------------------

    def on_unreachable(self, names: Collection[str]) -> None:
        """Handle workers that are not there, and whose agents don't answer; a rank that still sends will restart its agent."""
        silence = time.monotonic() - BEATS_MISSED * beat_interval(self._channels.size)
        for rank in {worker.rank for worker in self._plan.workers} - {COORDINATOR}:
            gone = all(str(worker.name) in names for worker in self._plan.for_rank(rank))
            if gone and rank not in self._without_workers and self._heard[rank] < silence:
                self._channels.mailbox.lost.add(rank)
                self._on_workers_ended(
                    rank, failed=True, why="its processes or its node died, or its network is down"
                )

    def _lose(self, rank: int, why: str) -> None:
        """Handle a lost rank: continue with the others, or end the cluster if too many are lost."""
        if self._ending.over or rank in self._lost:
            return
        self._lost.add(rank)
        workers = self._plan.for_rank(rank)
        host = next((host.host for host in self._plan.hosts if rank in host.ranks), "?")
        text = f"rank {rank} on {host} lost: {why}"
        if len(self._lost) > self._tolerated:
            lost = f"{text}; {len(self._lost)} ranks are lost (expected at most {self._tolerated}, tolerate_lost_ranks)"
            self.end_cluster(final=False, lost=lost)
            return
        gpus = len({device for worker in workers for device in worker.devices})
        left = sum(worker.rank not in self._without_workers for worker in self._plan.workers)
        text += (
            f"; it had {counted(len(workers), 'worker')} and {counted(gpus, 'GPU')}. Continuing with {counted(left, 'worker')}; "
            f"{counted(self._tolerated - len(self._lost), 'more rank')} may be lost. "
            "Fix: inspect that node, and the log file of the rank (--log-directory)"
        )
        say(f"warning: {text}")
        self._channels.order(Order.LOST_RANK, ([str(worker.name) for worker in workers], text))

    # -- ranks that have closed ---------------------------------------------------------------------------------

    @property
    def silent(self) -> list[int]:
        """Ranks that have not closed yet, and are not lost: MPI can't be left in an orderly way without them."""
        gone = self._closed | self._channels.mailbox.lost
        return [rank for rank in range(self._channels.size) if rank not in gone]

    def release_scheduler(self) -> None:
        """Let the scheduler close: all ranks have closed, or did not answer."""
        self._channels.send(self._plan.scheduler.rank, EndKind.RELEASE)

    # -- the last steps -----------------------------------------------------------------------------------------

    def finish(self, *, flushed: bool, final: bool) -> None:
        """Mark an orderly end; abort the job if a rank did not answer, since MPI would wait for it forever.

        `final`: no rank's program continues, so that a rank that is silent later, too, is lost.
        """
        mailbox = self._channels.mailbox
        code = self._ending.exit_code() or self._ending.code
        silent = self.silent
        if silent and len(self._lost.union(silent)) <= self._tolerated:
            say(
                f"warning: no response from {ranks_text(silent)} of {self._channels.size} at the end; "
                "continuing without. Fix: inspect their nodes"
            )
            self._lost.update(silent)
            mailbox.lost.update(silent)
        if mailbox.lost:
            mailbox.give_up_sending()
            flushed = True
            do_not_finalize(functools.partial(end_lost_ranks, mailbox.lost, code))
        if (silent := self.silent) or not flushed:
            names = ranks_text(silent) if silent else "a rank"
            say(
                f"error: no response from {names} of {self._channels.size} at the end; aborting the job. Fix: inspect their "
                "nodes (a rank that is stopped, a full disk, no network?)"
            )
            code = code or outcome.FAILED
            others = set(range(self._channels.size)) - {COORDINATOR} - mailbox.lost - set(silent)
            if (
                self._tolerated and not others
            ):  # of a job without other processes Open MPI's mpirun forgets the code of an abort
                self._lost.update(silent)
                self.leave_mark(code)
                leave_as_the_last(code)
            else:
                abort(code)
        else:
            self.leave_mark(code)
            if final:
                mailbox.on_silent = self._on_silent
                mailbox.patience = (
                    self._joined.options.shutdown_timeout + CLOSING_SLACK
                )  # to remove what was spilled

    def _on_silent(self, ranks: set[int]) -> None:
        """Ranks that have closed are silent at the end of this process."""
        self._closed -= ranks
        self.finish(flushed=True, final=False)

    def leave_mark(self, code: int) -> None:
        """Write the file ``ended`` into the log directory, with the job's exit code if ranks are lost.

        A launcher ends with another code if a rank was killed. Below Slurm, Open MPI 5's ``mpirun`` ends with code 0 when it has
        lost one of its daemons, which a job script would not notice.
        """
        if self._mark is not None and self._ending.ended:
            more = " lost" if len(self._lost) > self._tolerated else ""
            text = f"{code}{more}\n" if self._lost else ""
            with contextlib.suppress(OSError), open(open_to_append(self._mark), "w") as mark:
                mark.write(text)
