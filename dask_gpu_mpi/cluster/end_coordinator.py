"""What rank 0 does for the end of all ranks: it decides when the cluster is over, and gathers which ranks have closed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.safe_paths import open_to_append, remove
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.script import exit_codes
from dask_gpu_mpi.startup.bringup import Joined

from .ending import Cause, Ending
from .messages import EndKind

__all__ = ["EndCoordinator"]


class EndCoordinator:
    """The end, as rank 0 leads it.

    Parameters
    ----------
    joined : Joined
        Rank 0.
    ending : Ending
        Of rank 0.
    has_client : bool
        Whether some rank runs a script.
    """

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

        Parameters
        ----------
        final : bool
            The script has ended as well.
        lost : str, optional
            How the cluster was lost.
        signal : int, optional
            The signal that ends the job.
        code : int
            What the script exits with, as far as that is known.
        """
        ending = self._ending
        if lost is not None and not ending.state.over:
            ending.lost = lost
            say(
                f"error: {lost}: the cluster is lost. Fix: find out why, in the log files (--log-directory); out of memory, most "
                "often"
            )
        if final or not self._has_client:
            if not ending.state.ended:
                self._channels.mailbox.send_all(EndKind.END, code)
                ending.signal, ending.code = signal, code
                ending.on(Cause.END)
        elif not ending.state.over:
            self._channels.mailbox.send_all(EndKind.STOP, lost)
            ending.on(Cause.STOP)

    def on_message(self, kind: str, payload: Any) -> None:
        """Handle a message to rank 0 alone; others are ignored."""
        if kind == EndKind.CLOSED:
            self._closed.add(payload)
        elif kind == EndKind.OVER:
            final, lost, code = payload
            self.end_cluster(final=final, lost=lost, code=code)
        elif kind == EndKind.WORKERS_ENDED:
            self._on_workers_ended(*payload)
        elif kind == EndKind.SIGNAL:
            self._on_signal(payload)
        elif kind == EndKind.CLIENT:
            self._channels.send(self._plan.client.rank, EndKind.CLIENT)

    def _on_signal(self, number: int) -> None:
        """A rank was sent a signal: it ends the job, by way of the script where there is one."""
        if self._has_client:
            self._channels.send(self._plan.client.rank, EndKind.SIGNAL, number)
        else:
            self.end_cluster(final=True, signal=number)

    def _on_workers_ended(self, rank: int, failed: bool) -> None:
        """All workers of a rank have ended, by themselves."""
        self._without_workers[rank] = failed
        if not set(self._without_workers) >= {worker.rank for worker in self._plan.workers}:
            return
        if any(self._without_workers.values()):
            self.end_cluster(final=False, lost="no worker is left")
        elif not self._joined.options.scheduler:
            # Its owner has shut the cluster down. In one of our own, the scheduler's end is what counts.
            self.end_cluster(final=False)

    # -- who has closed -----------------------------------------------------------------------------------------

    @property
    def silent(self) -> list[int]:
        """Ranks that have not closed yet: MPI can't be left in an orderly way without them."""
        return [rank for rank in range(self._channels.size) if rank not in self._closed]

    def release_scheduler(self) -> None:
        """The ranks have closed, or did not answer: the scheduler may close."""
        self._channels.send(self._plan.scheduler.rank, EndKind.RELEASE)

    # -- the last things ----------------------------------------------------------------------------------------

    def finish(self, *, flushed: bool) -> None:
        """Leave the mark of an orderly end; or, where a rank did not answer, abort the job, since MPI would wait for it for ever.

        Parameters
        ----------
        flushed : bool
            Whether all messages got out.
        """
        if (silent := self.silent) or not flushed:
            names = ranks_text(silent) if silent else "a rank"
            say(
                f"error: no response from {names} of {self._channels.size} at the end; aborting the job. Fix: inspect their "
                "nodes (a rank that is stopped, a full disk, no network?)"
            )
            abort(exit_codes.of_abort(self._ending.exit_code() or self._ending.code))
        else:
            self.leave_mark()

    def leave_mark(self) -> None:
        """Mark in the log directory that the job has come to its end.

        Open MPI 5's ``mpirun`` ends with code 0 when it has lost a daemon of its own below Slurm: a job script could not tell.
        """
        if self._mark is not None and self._ending.state.ended:
            with contextlib.suppress(OSError):
                os.close(open_to_append(self._mark, make=True))
