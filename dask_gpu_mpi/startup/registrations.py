"""The part of the start that needs no plan: who has registered, what has failed, and the one report of all failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.options.model import OPTIONS, Options

from .channels import Event
from .messages import Cluster, Kind, Registration

__all__ = ["FailureCoordinator", "check_agreement", "check_client", "shared_options"]

#: Seconds to wait for the reports of other ranks once one has failed: most failures are everybody's.
GATHER_FAILURES = 1.0
#: Fields of the options that must be the same on all ranks, and what messages call one that is no option of its own.
SHARED = {option.name: option.name for option in OPTIONS.values() if option.same} | {
    "worker_ucx": "protocol (UCX between workers)"
}


class FailureCoordinator:
    """Rank 0 where it can't take part itself: it gathers what the other ranks report, and ends the start.

    `Coordinator` makes a cluster besides.

    Parameters
    ----------
    size : int
        Number of ranks.
    deadline : float
        ``time.monotonic()`` of the start-up deadline.
    hosts : mapping, optional
        Host of each rank, for reports about those that have not even registered.
    """

    def __init__(self, size: int, *, deadline: float, hosts: Mapping[int, str] | None = None) -> None:
        self.size = size
        #: The end of the start, once it is known.
        self.outcome: Cluster | DaskGpuMpiError | None = None
        self._deadline = deadline
        self._hosts = dict(hosts or {})
        self._registrations: dict[int, Registration] = {}
        self._failures: dict[int, Failure] = {}
        self._failed_at: float | None = None

    def handle(self, event: Event, now: float) -> bool:
        """Take one message; False when it is not for the coordinator."""
        source, kind, payload = event
        if source is None:
            return False
        if kind == Kind.REGISTRATION:
            self._registrations[source] = payload
            if payload.failure is not None:
                self._fail(source, payload.failure, now)
        elif kind == Kind.FAILED:
            self._fail(source, payload, now)
        else:
            return False
        return True

    def tick(self, now: float) -> None:
        """End the start when it is time to."""
        if self.outcome is not None:
            return
        if self._failed_at is not None:
            complete = len(self._failures) + self._others_reported() == self.size
            if complete or now > self._failed_at + self._report_timeout():
                self._end_with_report()
        elif now > self._deadline:
            text = "has not started its workers" if self._all_registered else "no response"
            for rank in self.waiting_for:
                self._failures[rank] = Failure(
                    f"{text} before the start-up timeout (startup_timeout). Fix: inspect that node (a rank that is stopped, no "
                    "memory left, a slow file system?), or set a longer startup_timeout (--startup-timeout)",
                    1,
                    of_a_rank=True,
                )
            self._end_with_report(fatal=True)

    def progress(self) -> tuple[int, int | None, list[str]]:
        """Workers that are ready, workers planned (None before the plan), and the hosts of the ranks that are awaited."""
        hosts = self.hosts
        return 0, None, [hosts.get(rank, "") for rank in self.waiting_for]

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each rank, as far as it is known."""
        return {**self._hosts, **{rank: found.host for rank, found in self._registrations.items()}}

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not registered."""
        return [rank for rank in range(self.size) if rank not in self._registrations]

    @property
    def _all_registered(self) -> bool:
        return len(self._registrations) == self.size

    def _others_reported(self) -> int:
        """How many ranks without a failure need not be waited for."""
        return 0

    def _report_timeout(self) -> float:
        """Seconds to wait for other failures after the first."""
        return GATHER_FAILURES

    def _fail(self, rank: int, failure: Failure, now: float) -> None:
        self._failures.setdefault(rank, failure)
        if self._failed_at is None:
            self._failed_at = now

    def _end_with_report(self, *, fatal: bool = False) -> None:
        self._end_with(one_report(self._failures, self.hosts, self.size), fatal=fatal)

    def _end_with(self, failure: Failure, *, fatal: bool = False) -> None:
        self.outcome = failure.error(reported=False)
        self.outcome.fatal = fatal


def shared_options(options: Options) -> tuple[tuple[str, object], ...]:
    """The options that must be the same on all ranks, as (name, value)."""
    return tuple((name, getattr(options, field)) for field, name in SHARED.items())


def check_agreement(registrations: Sequence[Registration]) -> None:
    """Whether all ranks, in order, have the same options.

    Raises
    ------
    InputError
        They have not.
    """
    first = registrations[0]
    for rank, other in enumerate(registrations):
        for (name, value), (_, found) in zip(first.shared_options, other.shared_options, strict=True):
            if value != found:
                raise InputError(
                    f"option {name} is {value!r} on rank 0 ({first.host}) and {found!r} on rank {rank} ({other.host}) "
                    "(expected the same on all ranks)"
                )


def check_client(registrations: Sequence[Registration], client: int) -> None:
    """Whether the client rank has something to run, where any rank has.

    Raises
    ------
    InputError
        Only others have.
    """
    having = [rank for rank, found in enumerate(registrations) if found.has_client]
    if having and client not in having:
        raise InputError(
            f"rank {client} ({registrations[client].host}) is the client, but only {ranks_text(having)} got a script or "
            "function to run (expected the same call on all ranks). Fix: pass it on all ranks, or set client_rank "
            "(--client-rank)"
        )
