"""What the scheduler's process is told of the options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.relay import scheduler_settings
from dask_gpu_mpi.view.job_facts import JobFacts, PlannedRow


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
