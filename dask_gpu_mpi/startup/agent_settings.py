"""From the options of a rank to the settings of the scheduler's process."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.orders import SchedulerSettings
from dask_gpu_mpi.diagnostics.job_facts import JobFacts
from dask_gpu_mpi.options.model import Options

__all__ = ["has_dashboard", "scheduler_settings"]


def has_dashboard(options: Options) -> bool:
    """Whether the user wants one, and its pages can be made."""
    return options.dashboard and importlib.util.find_spec("bokeh") is not None


def scheduler_settings(
    options: Options, listen: str, config: dict[str, Any], device: str, token: str, facts: JobFacts
) -> SchedulerSettings:
    """What the scheduler's process needs; `device`: UUID of the GPU that it may use over UCX, `token`: of the dashboard,
    `facts`: of the plan, to which the warnings of the options are added.
    """
    return SchedulerSettings(
        host=listen,
        port=options.scheduler_port or 0,
        protocol=options.protocol,
        dashboard=has_dashboard(options),
        dashboard_address=options.dashboard_address,
        config=config,
        token=token,
        device=device,
        facts=replace(facts, warnings=(*options.warnings, *facts.warnings)),
        records=options.report is not None,
        gpu_by_default=options.default_workers == "gpu",
    )
