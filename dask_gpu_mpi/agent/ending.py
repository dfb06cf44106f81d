"""The running cluster and its end, as the hub leads them: a state machine without processes or clocks, as `startup.coordinator`.

`agent.lead` makes it when the cluster is up, and passes it all messages of ranks, lost connections, and the time. It decides

- which ranks are lost, and whether the cluster can go on without them;
- when the cluster ends, in two steps, which may be one: STOP (the cluster is over, the script continues) and END (the job ends).
  After each, every agent closes its workers and answers CLOSED; then the scheduler may close (RELEASE);
- the exit code of a job in which ranks have not answered at its end (`outcome`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted, ranks_text
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.startup.messages import COORDINATOR, Event, Kind

#: Why a rank is lost whose connection has ended.
LOST = "its processes or its node died, or its network is down"


def report_lost_cluster(lost: str) -> None:
    """Print how the cluster was lost."""
    say(
        f"error: {lost}: the cluster is lost. Fix: find out why, in the log files (--log-directory); out of memory, most often"
    )


class EndCoordinator:
    """Decides when the cluster of this plan ends, and which ranks are lost.

    `send`: ``send(rank, kind, payload)``; rank None: to all. `has_client`: some rank runs a script. `absent`: ranks that take no
    part. `closing_time`: seconds in which all ranks have closed.
    """

    def __init__(
        self,
        plan: Plan,
        send: Callable[[int | None, Kind, Any], None],
        options: Options,
        *,
        has_client: bool,
        absent: Collection[int],
        closing_time: float,
    ) -> None:
        self._plan = plan
        self._send = send
        self._tolerated = options.tolerate_lost_ranks
        self._has_client = has_client
        #: Whether the job has started the cluster's scheduler.
        self._is_owner = options.scheduler
        self._closing_time = closing_time
        self._ranks = frozenset(range(plan.world_size))
        #: How far the end has come: STOP was sent, END was sent, the scheduler may close, all have answered END or are late.
        self.stopped = self.ended = self.released = self.over = False
        #: The payload of END: the exit code that ranks are to have, and the signal that ends the job.
        self.last_words: tuple[int, int | None] = (0, None)
        #: The exit code of the script; None: it is not known.
        self.code: int | None = None
        #: How the cluster was lost, if it was.
        self.lost: str | None = None
        #: Ranks that are lost.
        self.lost_ranks: set[int] = set(absent)
        #: Names of workers that have ended for good, and whether they have failed.
        self.ended_workers: dict[str | int, bool] = {}
        #: Ranks whose workers have all ended by themselves, and whether one of them had failed.
        self._without_workers: dict[int, bool] = {}
        #: Ranks that have answered the last STOP or END, and when to go on without the others.
        self._closed: set[int] = set()
        self._limit = 0.0

    @property
    def is_ending(self) -> bool:
        """Whether the cluster is over: the agents close their workers, or have done so."""
        return self.stopped or self.ended

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Handle one message."""
        source, kind, payload = event
        match kind:
            case Kind.CLOSED:
                self._closed.add(source)
                self._check_closed()
            case Kind.OVER:
                final, lost, code = payload
                self.end_cluster(now, final=final, lost=lost, code=code)
            case Kind.WORKER_ENDED:
                name, failed = payload
                self.ended_workers[name] = failed
            case Kind.WORKERS_ENDED:
                why = "its agent, or each of its workers, died too often"
                self._on_workers_ended(source, now, failed=payload, why=why)
            case Kind.SIGNAL if self._has_client:  # the script ends the job
                self._send(self._plan.client.rank, Kind.SIGNAL, payload)
            case Kind.SIGNAL:
                self.end_cluster(now, final=True, signal=payload)
            case Kind.CLIENT:
                self._send(self._plan.client.rank, Kind.CLIENT, None)
            case Kind.BUSY:
                self._send(None, Kind.BUSY, None)
            case Kind.GONE:
                self._on_lost(source, now, "its process has ended")

    def disconnected(self, rank: int, now: float) -> None:
        """The connection to a rank has ended: the rank and its agent are gone, or their node."""
        if self.ended and rank in self._closed:
            return
        if rank == self._plan.scheduler.rank and self._is_owner:
            lost = f"the agent of {self._rank_and_host(rank)} ended, and the scheduler with it"
            self.lost_ranks.add(rank)
            self.end_cluster(now, final=False, lost=lost)
            self._check_closed()
        else:
            self._on_lost(rank, now, LOST)

    def tick(self, now: float) -> None:
        """Give up ranks that have not closed for too long."""
        if self.is_ending and now > self._limit:
            self._on_all_closed()

    # -- the decision -------------------------------------------------------------------------------------------

    def end_cluster(
        self,
        now: float,
        *,
        final: bool,
        lost: str | None = None,
        signal: int | None = None,
        code: int | None = None,
    ) -> None:
        """End the cluster on all ranks, unless it is over.

        `final`: the script has ended as well. `lost`: how the cluster was lost. `signal`: the signal that ends the job.
        `code`: the exit code of the script; None: it is not known.
        """
        if lost is not None and not self.is_ending:
            self.lost = lost
            report_lost_cluster(lost)
        if final or not self._has_client:
            if not self.ended:
                self.ended = True
                self.code = code if self._has_client else 0
                self._begin_closing(now)
                failed = self.lost and not self._has_client
                self.last_words = ClusterLostError.exit_code if failed else code or 0, signal
                self._send(None, Kind.END, self.last_words)
        elif not self.is_ending:
            self.stopped = True
            self._begin_closing(now)
            self._send(None, Kind.STOP, lost)

    def _begin_closing(self, now: float) -> None:
        self._closed.clear()
        self._limit = now + self._closing_time

    def _check_closed(self) -> None:
        if self.is_ending and not self.silent:
            self._on_all_closed()

    def _on_all_closed(self) -> None:
        """All ranks have closed, or the others are late."""
        if not self.released:
            self.released = True
            self._send(self._plan.scheduler.rank, Kind.RELEASE, None)
        self.over = self.ended

    @property
    def silent(self) -> list[int]:
        """Ranks that have not closed yet, and are not lost."""
        return sorted(self._ranks - self._closed - self.lost_ranks)

    def _on_workers_ended(self, rank: int, now: float, *, failed: bool, why: str) -> None:
        """All workers of a rank have ended, by themselves."""
        failed = failed or any(self.ended_workers.get(worker.name) for worker in self._plan.for_rank(rank))
        self._without_workers[rank] = failed
        if failed and self._tolerated and rank != COORDINATOR:
            self._continue_without(rank, now, why)
        if not set(self._without_workers) >= {worker.rank for worker in self._plan.workers}:
            return
        if any(self._without_workers.values()):
            self.end_cluster(now, final=False, lost="no worker is left")
        elif not self._is_owner:
            # The owner of the cluster has shut it down. In a cluster that this job has started, the scheduler's end counts.
            self.end_cluster(now, final=False)

    @property
    def has_lost_too_many(self) -> bool:
        """Whether the cluster can't go on without the ranks that are lost."""
        return len(self.lost_ranks) > self._tolerated

    # -- lost ranks ---------------------------------------------------------------------------------------------

    def _on_lost(self, rank: int, now: float, why: str) -> None:
        """A rank is gone, with its agent and its workers."""
        if rank in self.lost_ranks:
            return
        if self._without_workers.get(rank) is False and rank != self._plan.client.rank:
            self.lost_ranks.add(rank)  # it has nothing that the cluster needs
            self._check_closed()
            return
        if self._tolerated and not self.is_ending:
            self._on_workers_ended(rank, now, failed=True, why=why)
            return
        self.lost_ranks.add(rank)
        # nobody else could end the job
        has_script = self._has_client and rank == self._plan.client.rank
        if has_script or not self.is_ending:
            lost = f"{self._rank_and_host(rank)} lost: {why}"
            self.end_cluster(now, final=has_script, lost=lost, code=ClusterLostError.exit_code)
        self._check_closed()

    def _rank_and_host(self, rank: int) -> str:
        host = next((host.host for host in self._plan.hosts if rank in host.ranks), "?")
        return f"rank {rank} on {host}"

    def _continue_without(self, rank: int, now: float, why: str) -> None:
        """Continue without a lost rank, or end the cluster if too many are lost."""
        if self.is_ending or rank in self.lost_ranks:
            return
        self.lost_ranks.add(rank)
        workers = self._plan.for_rank(rank)
        text = f"{self._rank_and_host(rank)} lost: {why}"
        if self.has_lost_too_many:
            lost = f"{text}; {len(self.lost_ranks)} ranks are lost (expected at most {self._tolerated}, tolerate_lost_ranks)"
            self.end_cluster(now, final=False, lost=lost)
            return
        gpus = len({device for worker in workers for device in worker.devices})
        left = sum(worker.rank not in self._without_workers for worker in self._plan.workers)
        text += (
            f"; it had {counted(len(workers), 'worker')} and {counted(gpus, 'GPU')}. Continuing with {counted(left, 'worker')}; "
            f"{counted(self._tolerated - len(self.lost_ranks), 'more rank')} may be lost. "
            "Fix: inspect that node, and the log file of the rank (--log-directory)"
        )
        say(f"warning: {text}")
        self._send(self._plan.scheduler.rank, Kind.LOST, ([str(worker.name) for worker in workers], text))

    # -- the last step ------------------------------------------------------------------------------------------

    def outcome(self) -> int:
        """The exit code that the job must have although its script has another one: ranks did not respond; 0: all did.

        To be called once, when the end is `over`.
        """
        size, silent = len(self._ranks), self.silent
        if not silent:
            return 0
        names = ranks_text(silent)
        if len(self.lost_ranks.union(silent)) <= self._tolerated:
            self.lost_ranks.update(silent)
            say(
                f"warning: no response from {names} of {size} at the end; continuing without. Fix: inspect their nodes"
            )
            return 0
        say(
            f"error: no response from {names} of {size} at the end; aborting the job. Fix: inspect their nodes (a rank that is "
            "stopped, a full disk, no network?)"
        )
        return self.code or ClusterLostError.exit_code
