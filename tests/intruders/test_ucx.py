"""Strangers at listeners of UCX: without its secret, and with bytes that are none of its own. See ci/ucx.sh."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from harness import Mpi
from intruderjobs import ATTACKS, Attacked, attacked, start

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.slow,
    pytest.mark.one_mpi,
    pytest.mark.skipif(
        find_spec("distributed_ucxx") is None,
        reason="distributed-ucxx is not installed: ci/ucx.sh installs it",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may become another user"),
]

NO_SECRET = "plain UCX lets everybody in"


@pytest.fixture(scope="module")
def job(jobs: Mpi) -> Attacked:
    """Two ranks on one host over UCX; the intruder is another user there."""
    networks = {os.readlink("/proc/self/ns/net"): "127.0.0.1"}
    # not "comm" as well: beside plain UCX the nannies speak TCP without TLS
    attacks = {kind: ATTACKS[kind] for kind in ("ucx", "uct")}
    # UCX_TLS: shared memory of another user's is closed to the intruder
    started = start(jobs, 2, options={"protocol": "ucx"})
    return attacked(started, ["env", "UCX_TLS=tcp"], networks, "nobody", attacks)


def test_every_listener_is_known(job: Attacked) -> None:
    assert job.unexpected == []
    assert "worker ucx" in {each.name for each in job.listeners}


@pytest.mark.xfail(strict=True, reason=NO_SECRET)
def test_nobody_gets_in(job: Attacked) -> None:
    found = job.outcomes["UCX without the secret"]
    assert {target: outcome for target, outcome in found.items() if not outcome.startswith("out")} == {}


@pytest.mark.xfail(strict=True, reason=NO_SECRET)
def test_nothing_is_deserialised(job: Attacked) -> None:
    assert not job.exploded


def test_the_result_is_right(job: Attacked) -> None:
    assert job.done is not None
    job.done.check(0)
    assert '"right": true' in job.done.stdout
