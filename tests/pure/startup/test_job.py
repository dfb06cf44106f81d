"""From options to what the coordinator needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from dask_gpu_mpi.startup.bringup import Preparation, make_job, prepare_job
from dask_gpu_mpi.startup.coordinator import Job


def job(prepared: dict[str, Any] | None = None, **options: Any) -> Job:
    preparation = Preparation(frozenset({"a.key"}), prepared)
    return make_job(Options(**options), preparation, Timeline("rank"))


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({"protocol": Protocol.TLS}, True),
        ({"protocol": Protocol.TCP}, False),
        ({"protocol": Protocol.TLS, "scheduler": False}, False),
    ],
)
def test_only_a_scheduler_with_tls_needs_credentials(options: dict[str, Any], has: bool) -> None:
    prepared = prepare_job(Options(**options), {})
    assert (prepared.credentials is not None) is has
    assert "distributed.comm.tls" not in repr(prepared)


def test_a_cluster_of_our_own() -> None:
    made = job({"key": "secret"}, protocol=Protocol.TLS, cpu_workers=1, name="n")
    assert made.credentials() == {"key": "secret"}
    assert (made.protocol, made.target, made.configured) == ("tls", None, {"a.key"})
    plan = made.plan(hypothetical_job(1, 2, 0), True, {})
    assert all(str(worker.name).startswith("n-") for worker in plan.workers)


def test_ucx_needs_no_credentials() -> None:
    assert "key" not in job(protocol=Protocol.UCX).credentials()
    assert job(protocol=Protocol.TCP).credentials() == {}


def test_only_a_deadline_that_nobody_set_may_grow() -> None:
    assert job().patient
    assert not job(startup_timeout=60.0, explicit=frozenset({"startup_timeout"})).patient


def test_workers_that_attach_have_names_of_their_own() -> None:
    made = job(scheduler=False, scheduler_address="tcp://10.0.0.9:5", protocol=Protocol.TCP)
    assert made.target is not None
    assert made.target.address == "tcp://10.0.0.9:5"
    plan = made.plan(hypothetical_job(1, 1, 0), True, {})
    assert all(str(worker.name).startswith("join-") for worker in plan.workers)


def test_what_can_not_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        job(scheduler=False, scheduler_file=str(tmp_path / "none.json"))
