"""What MPI itself is open to: where the ranks and the launcher listen, and what comes of strangers there (docs/security.md)."""

from __future__ import annotations

import pytest

from harness import Mpi
from intruderjobs import Attacked
from listeners import beyond_loopback

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

#: Where the ranks listen on several hosts: Open MPI on all interfaces, whatever is set; MPICH on each of the network.
RANKS = {"openmpi": {"0.0.0.0", "::"}, "mpich": {"10.77.0.1", "10.77.0.2"}}
LAUNCHERS = {"openmpi": {"0.0.0.0", "::"}, "mpich": {"0.0.0.0"}}


def test_on_one_host_only_the_launcher_listens_beyond_loopback(
    from_another_user: Attacked, jobs: Mpi
) -> None:
    assert beyond_loopback(from_another_user.listeners) == {"launcher": LAUNCHERS[jobs.name]}


def test_on_several_hosts_exactly_these_listen(from_another_host: Attacked, jobs: Mpi) -> None:
    network = {"10.77.0.1", "10.77.0.2"}
    assert beyond_loopback(from_another_host.listeners) == {
        "launcher": LAUNCHERS[jobs.name],
        "rank": RANKS[jobs.name],
        "rank start": network,
        "scheduler comm": {"10.77.0.1"},
        "worker comm": network,
        "nanny comm": network,
    }


def test_a_rank_that_is_none_from_another_host(from_another_host: Attacked) -> None:
    """Open MPI takes a rank's handshake only from an address of that rank's host."""
    assert from_another_host.outcomes["a rank's handshake"]
    assert from_another_host.done is not None
    from_another_host.done.check(0)
    assert not from_another_host.exploded


def test_a_rank_that_is_none_does_not_end_the_job(
    from_a_host_of_the_job: Attacked, jobs: Mpi, request: pytest.FixtureRequest
) -> None:
    """Under Open MPI another user of a node of the job can end it: its 24 bytes name any rank, and nobody is asked for more."""
    if jobs.name == "openmpi":
        why = "Open MPI 5.0.11 ends the job when a connection in the name of a rank is closed"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    assert from_a_host_of_the_job.done is not None
    from_a_host_of_the_job.done.check(0)


def test_what_a_rank_that_is_none_sends_is_not_unpickled(from_a_host_of_the_job: Attacked) -> None:
    """Before messages were plain data the same attack did run code, under Open MPI."""
    assert from_a_host_of_the_job.outcomes["a rank's handshake"]
    assert not from_a_host_of_the_job.exploded
