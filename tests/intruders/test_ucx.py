"""Strangers at workers with UCX beside TLS. See ci/ucx.sh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from support.intruders.jobs import ATTACKS, Attacked, attacked, let_in, start
from support.jobs.mpi import Mpi
from support.jobs.ucx import needs_ucx

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.slow,
    needs_ucx,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may become another user"),
]

WITHOUT, ANOTHER = "UCX without the secret", "a worker of another job, with UCX"
MEMORY = "memory by UCX"


def attacked_job(
    jobs: Mpi,
    attacks: Mapping[str, Sequence[Sequence[str]]],
    *,
    chosen: Mapping[str, str] | None = None,
    **options: Any,
) -> Attacked:
    """Two ranks on one host; the intruder is another user there."""
    networks = {os.readlink("/proc/self/ns/net"): "127.0.0.1"}
    # UCX_TLS: shared memory of another user's is closed to the intruder
    job = start(jobs, 2, options=options, chosen=chosen)
    return attacked(job, ["env", "UCX_TLS=tcp"], networks, "nobody", attacks)


@pytest.fixture(scope="module")
def job(jobs: Mpi) -> Attacked:
    ways = (
        ("TLS without a certificate", "another job's certificate", "a process of Dask", ANOTHER, WITHOUT),
    )
    return attacked_job(jobs, {"comm": ways, "uct": ATTACKS["uct"]}, protocol="ucx")


def test_every_listener_is_known(job: Attacked) -> None:
    assert job.unexpected == []
    # UCX has no port of its own
    assert [each for each in job.listeners if each.name in ("worker", "scheduler", "agent", "rank")] == []
    assert {each.name for each in job.listeners if not each.place.on_loopback} <= {"launcher"}


def test_nobody_gets_in(job: Attacked) -> None:
    """Nothing is read, no memory is open to the group, and the result is right."""
    assert {WITHOUT, ANOTHER} <= job.outcomes.keys()
    for attack, found in job.outcomes.items():
        assert let_in(found) == {}, attack
    assert job.harmed == {}
    assert job.open_memory == []
    assert not job.exploded
    assert '"right": true' in job.done.check().stdout


def test_with_a_port_of_ucx_they_do_get_in(jobs: Mpi) -> None:
    """Which shows that the attack is one: the user has asked for UCX over TCP. It writes; no handler is there that reads."""
    chosen = {"UCX_TLS": "tcp,self,posix", "UCX_NET_DEVICES": "lo"}
    found = attacked_job(jobs, {"uct": ((MEMORY,),)}, chosen=chosen, protocol="ucx")
    assert len(found.hidden) == 2
    assert found.outcomes[MEMORY] == dict.fromkeys(found.hidden, "in: wrote")
    assert found.harmed == dict.fromkeys(found.hidden, "written")
