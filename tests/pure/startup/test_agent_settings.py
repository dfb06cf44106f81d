"""What an agent is told of the options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dask_gpu_mpi.diagnostics.job_facts import JobFacts, PlannedRow
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.agent_settings import configuration, grace, scheduler_settings, worker_settings
from dask_gpu_mpi.startup.messages import Start


def test_an_agent_that_replaces_another_has_no_deadline_for_mpi() -> None:
    told = configuration(Options(log_level="debug", shutdown_timeout=3.0), speaks=False)
    assert (told.log_level, told.shutdown_timeout, told.grace) == ("debug", 3.0, 1.5)
    assert told.mpi_deadline == math.inf
    assert not told.speaks


def test_the_users_class_and_options_are_in_the_first_frame_alone() -> None:
    options = Options(
        worker_class="a.B",
        worker_options={"x": 1},
        interface="ib0",
        log_directory="/logs",
        local_directory="/fast",
    )
    told = configuration(options, speaks=True, mpi_deadline=5.0)
    assert (told.worker_class, told.worker_options) == ("a.B", {"x": 1})
    assert (told.interface, told.log_directory, told.local_directory) == ("ib0", "/logs", "/fast")
    assert (told.mpi_deadline, told.speaks) == (5.0, True)


@pytest.mark.parametrize(("timeout", "seconds"), [(1.0, 0.5), (4.0, 2.0), (60.0, 2.0)])
def test_workers_close_well_within_the_deadline(timeout: float, seconds: float) -> None:
    assert grace(Options(shutdown_timeout=timeout)) == seconds


@pytest.mark.parametrize(("limit", "timeout"), [(0.0, 60.0), (400.0, 400.0)])
def test_workers_wait_for_the_scheduler_as_long_as_the_start_may_take(limit: float, timeout: float) -> None:
    start = Start(
        "ucx://h:1", "ucx", "10.0.0.1", (), {"key": "secret"}, beside_gpus=True, delay=0.5, limit=limit
    )
    told = worker_settings(Options(startup_timeout=60.0, interface="ib0"), start)
    assert told.death_timeout == timeout
    assert (told.address, told.protocol, told.host) == ("ucx://h:1", "ucx", "10.0.0.1")
    assert told.delay == 0.5
    assert told.beside_gpus


def test_any_port_is_port_0() -> None:
    facts = JobFacts((PlannedRow("0", "h", "cpu"),), ("of the plan",))
    told = scheduler_settings(
        Options(warnings=("of an option",)), "10.0.0.1", {"key": "secret"}, "GPU-x", "s3cret", facts
    )
    assert (told.host, told.port, told.device) == ("10.0.0.1", 0, "GPU-x")
    assert "secret" not in repr(told)
    assert told.facts == replace(facts, warnings=("of an option", "of the plan"))


@pytest.mark.parametrize(("where", "gpu_by_default"), [("all", False), ("gpu", True)])
def test_the_scheduler_knows_where_tasks_run_that_ask_for_nothing(where: str, gpu_by_default: bool) -> None:
    told = scheduler_settings(Options(default_workers=where), "h", {}, "", "token", JobFacts())
    assert told.gpu_by_default is gpu_by_default
