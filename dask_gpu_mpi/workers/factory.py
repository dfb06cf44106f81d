"""A worker from its line of the plan, and from what all workers of its rank have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.network.ucx import hidden_transports, shown_transports, users_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.plan.model import WorkerPlan

from .cuda_worker import make_cuda_worker
from .settings import Start
from .worker_class import accepted_options, is_cuda_worker, worker_class_for
from .worker_options import options_for

__all__ = ["make_worker"]

#: Least bytes of host memory that go over UCX where the user wants that: below, TLS is as fast.
LARGE = 65536
LOOPBACK = "127.0.0.1"


def make_worker(plan: WorkerPlan, start: Start, options: Options, scratch: str) -> Any:
    """Make the worker that `plan` describes; it starts when awaited.

    Parameters
    ----------
    plan : WorkerPlan
        Its line of the plan.
    start : Start
        What it shares with the other workers of its rank.
    options : Options
        What the user has set, the class and its options (`read_worker_options`) among it.
    scratch : str
        The agent's directory; each worker makes a directory of its own in it.

    Returns
    -------
    distributed.core.Server
        A CUDAWorker, Nanny, Worker or whatever the user's class makes.

    Raises
    ------
    InputError
        An option does not fit the device.
    """
    import distributed

    from .plugins import plugins_of

    cls = worker_class_for(plan.kind, options.worker_class)
    given = options_for(cls, options.worker_options)
    ours: dict[str, Any] = {
        "name": plan.name,
        "nthreads": plan.nthreads,
        "memory_limit": plan.memory_limit or None,
        "local_directory": scratch,
        "protocol": str(start.protocol),
    }
    if not (is_cuda_worker(cls) or issubclass(cls, (distributed.Nanny, distributed.Worker))):
        # A class of the user's: dask-mpi's six options, the scheduler through the Dask configuration, as dask-mpi has it.
        return cls(**{**ours, "interface": options.interface, **given})
    ours |= {
        "host": start.listen,
        # bokeh would be imported in every worker; the address is of plain HTTP, with or without a dashboard
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": max(options.startup_timeout, start.limit),
    }
    plugins = [*plugins_of(plan, options.log_directory, records=options.report is not None)]
    if is_cuda_worker(cls) or issubclass(cls, distributed.Nanny):  # others run in this process
        plugins += _ucx_plugin(plan, start)
    if is_cuda_worker(cls):
        given = {"device_memory_limit": "default", **given, **plan.device_sizes}
        resources = [f"{key}={value:g}" for key, value in plan.resources.items()]
        given["resources"] = " ".join(filter(None, [*resources, given.get("resources")]))
        return make_cuda_worker(cls, plan, {**ours, "scheduler": start.address, **given}, plugins)
    if cls is distributed.Nanny:
        # Where the class is "auto" or CUDAWorker, options that only CUDAWorker has are not for CPU workers.
        known = accepted_options(cls, given.get("worker_class")) or given
        given = {key: value for key, value in given.items() if key in known}
    given["plugins"] = {*given.get("plugins", ()), *plugins}
    if plan.resources:
        ours["resources"] = dict(plan.resources)
    if issubclass(cls, distributed.Nanny):
        ours |= _for_nanny(cls, plan, beside_gpus=start.beside_gpus)
    # a CPU worker is to make no context either
    with users_config() if plan.kind == "gpu" else nullcontext():
        return cls(start.address, **_merge(ours, given))


def _ucx_plugin(plan: WorkerPlan, start: Start) -> Iterator[Any]:
    """What has the worker offer UCX to others. Not a CPU worker beside GPU workers, which must not touch their devices."""
    transport = start.transport
    if transport.ucx is WorkerUcx.OFF or (plan.kind == "cpu" and start.beside_gpus):
        return
    from distributed.comm.addressing import get_address_host

    from .plugins import UcxBetweenWorkers

    host_frames = LARGE if transport.ucx is WorkerUcx.ALL else 0
    probes = start.ucx_probe is not None and plan.name == start.ucx_probe
    # where no address was chosen the job has joined a cluster
    listens = start.listen or get_address_host(start.address)
    yield UcxBetweenWorkers(
        host_frames,
        loopback=listens == LOOPBACK,
        leads=transport.between_nodes,
        warned=bool(transport.warning),
        probes=probes,
    )


def _for_nanny(cls: type, plan: WorkerPlan, *, beside_gpus: bool) -> dict[str, Any]:
    """What a Nanny is given besides, for its worker's process: the devices that it sees, and what it measures."""
    import distributed

    ours: dict[str, Any] = {}
    if plan.device is not None:
        ours["env"] = {**shown_transports(), VISIBLE_DEVICES: plan.device}
    elif beside_gpus:
        # a CPU worker beside GPU workers must not touch their devices
        ours["env"] = {**hidden_transports(), VISIBLE_DEVICES: ""}
    if plan.kind == "cpu" and cls is distributed.Nanny:
        # Its worker would show the first GPU's memory and load as its own. And to ask for RMM's initialises CUDA, one process
        # after the other: 32 workers of a host took two seconds.
        ours["config"] = {"distributed.diagnostics.nvml": False}
        ours["metrics"] = {}
    return ours


def _merge(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options win, except that environments, resources and configurations are added to ours.

    >>> _merge({"env": {"A": "1"}, "nthreads": 1}, {"env": {"B": "2"}, "nthreads": 2})
    {'env': {'A': '1', 'B': '2'}, 'nthreads': 2}
    """
    merged = {**ours, **options}
    for key in ("env", "resources", "config"):
        if isinstance(ours.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**ours[key], **options[key]}
    return merged
