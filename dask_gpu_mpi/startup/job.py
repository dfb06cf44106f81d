"""From the options of rank 0 to what the coordinator needs of the job: how to plan, credentials, the cluster to attach to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.scheduler_file import Target, read_target
from dask_gpu_mpi.network.ucx import connection_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import placement_options
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.plan.scaling import configured_keys
from dask_gpu_mpi.sites.batch import end_time

from .coordinator import Job

__all__ = ["Preparation", "make_job", "prepare_job"]


@dataclass(frozen=True)
class Preparation:
    """What takes the coordinator's rank long, and can be done while its agent imports."""

    #: Keys of `plan.scaling` that the user has configured.
    configured: frozenset[str]
    #: Dask configuration that carries the credentials; None: this job needs none of its own.
    credentials: dict[str, Any] | None = field(repr=False)


def prepare_job(options: Options, environ: Mapping[str, str]) -> Preparation:
    """Read what the user has configured (where that is anything of the kind, it imports Dask), and generate the credentials."""
    if not (options.scheduler and options.protocol.encrypts):
        return Preparation(configured_keys(), None)
    # A batch system that has to be asked may take seconds.
    with ThreadPoolExecutor(1) as pool:
        job_end = pool.submit(end_time, environ)
        configured = configured_keys()
        return Preparation(configured, _generate_credentials(job_end))


def make_job(options: Options, preparation: Preparation, timeline: Timeline) -> Job:
    """The job of these options.

    Raises
    ------
    InputError
        The cluster to attach to can't be found.
    """
    target: Target | None = None
    name = options.name
    if not options.scheduler:
        target = read_target(options)
        name = target.unique_name(options.name)
    placement = placement_options(options, name=name)

    def plan(inventories: list[Inventory], has_client: bool) -> Plan:
        with timeline.step("plan"):
            return make_plan(inventories, replace(placement, has_client=has_client))

    return Job(
        options.protocol,
        plan,
        _credentials(options, preparation),
        target=target,
        configured=preparation.configured,
        patient="startup_timeout" not in options.explicit,
        ucx=options.worker_ucx,
    )


def _credentials(options: Options, preparation: Preparation) -> Callable[[], dict[str, Any]]:
    if options.protocol.moves_device_memory:
        return functools.partial(connection_config, options.worker_options)
    return lambda: preparation.credentials or {}


def _generate_credentials(job_end: Future[float | None]) -> dict[str, Any]:
    from dask_gpu_mpi.network.credentials import make_credentials

    return make_credentials(job_end=job_end.result()).dask_config()
