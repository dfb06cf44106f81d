"""The order of the timeouts: each side waits longer than the one that it waits for."""

from __future__ import annotations

import itertools

import pytest

from dask_gpu_mpi.base import timeouts as t
from dask_gpu_mpi.options.model import Options


def test_after_the_startup_deadline_whoever_knows_more_reports_first() -> None:
    reports = [
        t.NAME_MISSING,  # rank 0, once each rank has reported those of its host
        t.NAME_MISSING + t.RANK_0_GRACE,  # another rank, for rank 0
        t.NAME_STOPPED,  # ranks whose MPI has not started, of those of their host
        t.MPI_GRACE,  # these end the job
        t.HANGING,  # rank 0, of its agent
        t.RANK_0_LOST,  # the other ranks give rank 0 up
    ]
    # Each report has time to be printed and forwarded before the next.
    assert all(later - earlier >= 0.5 for earlier, later in itertools.pairwise(reports))


#: What is shorter comes first.
ORDERS = {
    "check goes on without late tasks": (
        t.CHECK_NODES,
        t.CHECK_KERNELS,
        t.CHECK_REPORTS,
        t.CHECK_WITHIN_NODES,
    ),
    "check ends with its last tasks": (t.CHECK_WITHIN_NODES, t.CHECK_BETWEEN_NODES, t.CHECK_TASKS),
    "check ends before a job's start would": (t.CHECK_START + t.CHECK_TASKS, Options().startup_timeout),
    "a connection without UCX stays on TLS": (t.UCX_START + t.UCX_PROOF, t.UCX_AGREEMENT),
    "a gang waits for the workers of another": (t.GANG_KILL, t.GANG_RETURN),
    "a gang is lost after its workers": (t.GANG_KILL + t.GANG_RETURN, t.GANG_LOST),
    "rank 0 has the first word": (0, t.FAILED_GRACE, t.GATHER_FAILURES),
    "rank 0's report arrives": (t.GATHER_FAILURES + t.FLUSH, t.UNHEARD, t.RANK_0_LOST),
    "last words are written": (t.FLUSH, t.CLOSING_SLACK, t.AGENT_SLACK),
    "the script's finally has longer than the reason": (t.REASON_TIMEOUT, t.TERM_GRACE),
    "what is killed ends first": (t.KILLING, t.TERM_GRACE, t.LAUNCHER_PATIENCE, t.UNCONFIGURED),
}


@pytest.mark.parametrize("waits", ORDERS.values(), ids=ORDERS)
def test_each_side_waits_longer_than_the_one_that_it_waits_for(waits: tuple[float, ...]) -> None:
    assert all(earlier < later for earlier, later in itertools.pairwise(waits))


def test_those_that_may_be_equal() -> None:
    assert t.TERM_GRACE <= t.LOST_GRACE
    assert Options().startup_timeout >= t.WITHOUT_OPTIONS  # of a rank whose options are invalid
