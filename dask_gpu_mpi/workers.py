"""A worker from its line of the plan.

What `dask_cuda.CUDAWorker` gets wrong when it knows nothing of ranks is put right here, and nowhere else (dask-cuda 26.10):

- it makes a worker for every visible GPU: each is made with exactly one GPU visible, by UUID, so that its name and the device
  of its limits are right, and CUDA makes a context that sees one device only (half a second instead of two on four GPUs);
- the CPU affinity that it sets is the GPU's, whatever the rank was bound to: the plan's cores are put in its place;
- fractions of device memory mean NVML's device 0, or the parent of a MIG slice: they become bytes of the worker's own device;
- ``resources`` must be a string, and a string for ``preload`` is iterated by character: see `worker_options`;
- every worker imports bokeh for a dashboard of its own, which listens on all interfaces: off unless asked for.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .errors import InputError
from .messages import WorkerSettings
from .placement import WorkerPlan
from .worker_options import import_worker_class, normalise_worker_options

__all__ = ["device_bytes", "make_worker", "worker_class_for"]

#: Options of CUDAWorker that may be fractions of a device's memory, and the alignment that RMM wants of them (bytes).
DEVICE_FRACTIONS = {
    "device_memory_limit": 1,
    "rmm_pool_size": 256,
    "rmm_maximum_pool_size": 256,
    "rmm_release_threshold": 256,
}
#: dask-cuda's "default" for device_memory_limit (dask_cuda.utils.parse_device_memory_limit).
DEFAULT_DEVICE_FRACTION = 0.8


def worker_class_for(kind: str, worker_class: str | type) -> type:
    """The class of a worker of this `kind` (``"gpu"`` or ``"cpu"``), imported."""
    if worker_class == "auto":
        return import_worker_class("dask_cuda.CUDAWorker" if kind == "gpu" else "distributed.Nanny")
    chosen = import_worker_class(worker_class)
    if kind == "cpu" and chosen.__name__ == "CUDAWorker":
        # --cpu-workers beside GPU workers
        return import_worker_class("distributed.Nanny")
    return chosen


def make_worker(plan: WorkerPlan, settings: WorkerSettings) -> Any:
    """Make the worker that `plan` describes; it starts when awaited.

    Parameters
    ----------
    plan : WorkerPlan
        Its line of the plan.
    settings : WorkerSettings
        What it shares with the other workers of its rank.

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

    cls = worker_class_for(plan.kind, settings.worker_class)
    options = normalise_worker_options(cls, settings.worker_options)
    if issubclass(cls, (distributed.Nanny, distributed.Worker)):
        options["plugins"] = {*options.get("plugins", ()), *worker_plugins(plan, settings)}
    base: dict[str, Any] = {
        "name": plan.name,
        "nthreads": plan.nthreads,
        "memory_limit": plan.memory_limit or None,
        "local_directory": settings.local_directory,
    }
    if cls.__name__ == "CUDAWorker":
        return _make_cuda_worker(cls, plan, settings, base, options)
    if issubclass(cls, (distributed.Nanny, distributed.Worker)):
        base |= {"host": settings.host, "protocol": settings.protocol, "dashboard": False}
        base["dashboard_address"] = "127.0.0.1:0"  # plain HTTP, with or without a dashboard
        base["death_timeout"] = settings.death_timeout
        if plan.resources:
            base["resources"] = dict(plan.resources)
        if issubclass(cls, distributed.Nanny) and plan.kind == "cpu" and settings.worker_class == "auto":
            options = _without_gpu_options(options)
        if plan.kind == "gpu" and plan.device is not None:
            base["env"] = {"CUDA_VISIBLE_DEVICES": plan.device}
        elif settings.device_memory and issubclass(cls, distributed.Nanny):
            # a CPU worker beside GPU workers must not touch their devices
            base["env"] = {"CUDA_VISIBLE_DEVICES": ""}
        if issubclass(cls, distributed.Worker):
            base.pop("env", None)
        return cls(settings.address, **_merge(base, options))
    # A class of the user's: dask-mpi's six options, the scheduler through the Dask configuration, as dask-mpi has it.
    base |= {"interface": settings.interface, "protocol": settings.protocol}
    return cls(**_merge(base, options))


def _merge(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options win, except that environments and resources are added to ours."""
    merged = {**base, **options}
    for key in ("env", "resources"):
        if isinstance(base.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**base[key], **options[key]}
    return merged


def _without_gpu_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without a GPU the same command gives CPU workers: options that only CUDAWorker knows do not apply to them."""
    import inspect

    import distributed

    known: set[str] = set()
    for cls in (distributed.Nanny, distributed.Worker):
        known |= set(inspect.signature(cls.__init__).parameters)
    return {key: value for key, value in options.items() if key in known}


def _make_cuda_worker(
    cls: type, plan: WorkerPlan, settings: WorkerSettings, base: dict[str, Any], options: dict[str, Any]
) -> Any:
    from dask_cuda.plugins import CPUAffinity

    assert plan.device is not None  # a GPU worker has a device: the plan's own invariant
    memory = settings.device_memory.get(plan.device, 0)
    options = {"device_memory_limit": "default", **options}
    if memory:
        for key, alignment in DEVICE_FRACTIONS.items():
            if key in options:
                options[key] = device_bytes(options[key], memory, alignment, f"{key} of worker {plan.name}")
    resources = " ".join(f"{key}={value:g}" for key, value in plan.resources.items())
    if options.get("resources"):
        resources = f"{resources} {options.pop('resources')}"
    base |= {
        "scheduler": settings.address,
        "host": settings.host,
        "protocol": settings.protocol,
        "resources": resources,
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": settings.death_timeout,
    }
    with visible_device(plan.device), _kept_ucx_config():
        worker = cls(**_merge(base, options))
        for nanny in worker.nannies:
            # CUDAWorker has set it in this process, too, where it would make a context
            ucx = copy.deepcopy(nanny.config.get("distributed-ucxx")) or {}
            ucx.get("environment", {}).pop("sockaddr-tls-priority", None)  # the switches say it already
            nanny.config = {**nanny.config, "distributed-ucxx": ucx}
    for nanny in worker.nannies:
        if "UCX_TLS" in os.environ:
            nanny.env = {
                **nanny.env,
                "UCX_TLS": os.environ["UCX_TLS"],
            }  # `hide_gpus` changes it in this process
        plugins = nanny.worker_kwargs.get("plugins", set())
        for plugin in plugins:
            if isinstance(plugin, CPUAffinity):
                plugin.cores = list(plan.cpus)
        nanny.worker_kwargs["plugins"] = {*plugins, *worker_plugins(plan, settings)}
    return worker


@contextmanager
def _kept_ucx_config() -> Iterator[None]:
    """Keep the configuration of UCX that is for this process: CUDAWorker's own is for its workers."""
    import dask

    before = copy.deepcopy(dask.config.get("distributed-ucxx", None))
    try:
        yield
    finally:
        if before is None:
            dask.config.config.pop("distributed-ucxx", None)
        else:
            dask.config.config["distributed-ucxx"] = before


def worker_plugins(plan: WorkerPlan, settings: WorkerSettings) -> Iterator[Any]:
    """What runs inside the worker: the label on its tasks' exceptions, and its log file, if there is a log directory."""
    from .worker_plugins import Label, LogFile

    gpu = f", GPU {plan.device}" if plan.device else ""
    yield Label(f"[raised by worker {plan.name}, rank {plan.rank} on host {plan.host}{gpu}]")
    if settings.log_directory is not None:
        gpu = f"-{plan.device[:12]}" if plan.device else ""
        yield LogFile(settings.log_directory, f"worker-{plan.name}-{plan.host}{gpu}")


@contextmanager
def visible_device(device: str) -> Iterator[None]:
    """Show exactly `device` to code that reads ``CUDA_VISIBLE_DEVICES`` while it is constructed."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def device_bytes(value: Any, memory: int, alignment: int, what: str) -> Any:
    """Turn a fraction of a device's memory into bytes; leave everything else as dask-cuda understands it.

    Parameters
    ----------
    value : int, float, str or None
        ``"default"`` = 0.8, ``"auto"`` = all, a float or its text in (0, 1] = that fraction; the rule is dask-cuda's
        (``parse_device_memory_limit``), where 1 (int or ``"1"``) is one byte and 1.0 everything.
    memory : int
        Bytes of the worker's own device (of its slice, under MIG).
    alignment : int
        Bytes; the result is a multiple.
    what : str
        Names the option in the error.

    Raises
    ------
    InputError
        More than the device has.
    """
    if value == "default":
        value = DEFAULT_DEVICE_FRACTION
    elif value == "auto":
        value = 1.0
    fraction: float | None = None
    if isinstance(value, float) or (isinstance(value, str) and value.strip() != "1"):
        try:
            fraction = float(value)
        except ValueError:
            fraction = None
    if fraction is not None and 0.0 < fraction <= 1.0:
        return int(memory * fraction) // alignment * alignment
    if isinstance(value, (int, str)) and not isinstance(value, bool) and value:
        from dask.utils import parse_bytes

        size = parse_bytes(value)
        if size > memory:
            raise InputError(
                f"{what}: {value!r} is more than its device has ({memory} bytes): ask for less, or for a fraction"
            )
        return size // alignment * alignment
    return value
