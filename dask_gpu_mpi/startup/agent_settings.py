"""From the options of a rank, and its part of the plan, to the settings of its agent."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.orders import Configuration, SchedulerSettings
from dask_gpu_mpi.diagnostics.job_facts import JobFacts
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.workers.settings import WorkerSettings

from .messages import Start

__all__ = ["configuration", "grace", "has_dashboard", "scheduler_settings", "worker_settings"]


def configuration(options: Options, *, speaks: bool, mpi_deadline: float = math.inf) -> Configuration:
    """The first message to an agent. `speaks`: it reports if MPI has not come together at `mpi_deadline` (monotonic seconds)."""
    loaded = sys.modules.get("dask.config")
    return Configuration(
        worker_class=options.worker_class,
        worker_options=dict(options.worker_options),
        local_directory=options.local_directory,
        protocol=options.protocol,
        log_level=options.log_level,
        worker_ucx=options.worker_ucx,
        dask_config=dict(loaded.config) if loaded is not None else {},
        grace=grace(options),
        shutdown_timeout=options.shutdown_timeout,
        log_directory=options.log_directory,
        interface=options.interface,
        records=options.report is not None,
        mpi_deadline=mpi_deadline,
        speaks=speaks,
    )


def grace(options: Options) -> float:
    """Seconds that workers get to close politely, well within the shutdown deadline."""
    return min(2.0, options.shutdown_timeout / 2)


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


def worker_settings(options: Options, start: Start) -> WorkerSettings:
    """What the workers of this rank have in common."""
    return WorkerSettings(
        address=start.address,
        protocol=start.protocol,
        host=start.listen,
        death_timeout=max(options.startup_timeout, start.limit),
        delay=start.delay,
        beside_gpus=start.beside_gpus,
        transport=start.transport,
        ucx_probe=start.ucx_probe,
    )
