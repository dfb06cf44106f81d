"""A worker from its line of the plan.

What `dask_cuda.CUDAWorker` gets wrong when it knows nothing of ranks is put right here, and nowhere else (dask-cuda 26.10):

- it makes a worker for every visible GPU: each is made with exactly one GPU visible, by UUID, so that its name and the device
  of its limits are right, and CUDA makes a context that sees one device only (half a second instead of two on four GPUs);
  a worker of several GPUs is made with its first one visible, and its nanny is then told to show its process all of them;
- the CPU affinity that it sets is the GPU's, whatever the rank was bound to: the plan's cores are put in its place;
- fractions of device memory mean NVML's device 0, or the parent of a MIG slice: they become bytes of the worker's own device;
- ``resources`` must be a string, and a string for ``preload`` is iterated by character: see `worker_options`;
- every worker imports bokeh for a dashboard of its own, which listens on all interfaces: off unless asked for.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.network.ucx import SECTION, hidden_transports, shown_transports, users_config
from dask_gpu_mpi.options.rules import SWITCHES
from dask_gpu_mpi.plan.device_memory import DEVICE_SIZES, device_bytes
from dask_gpu_mpi.plan.model import WorkerPlan

from .orders import WorkerSettings
from .worker_options import (
    accepted_options,
    import_worker_class,
    is_cuda_worker,
    normalise_worker_options,
)

__all__ = [
    "kill_at_once",
    "listen_on_tcp",
    "make_worker",
    "measure_less",
    "tasks_run_in_agent",
    "worker_class_for",
]

#: What options of CUDAWorker import in the worker, where it would be a traceback, or (cuDF) passed over in silence.
MODULES = {
    "rmm": (
        "rmm_pool_size",
        "rmm_managed_memory",
        "rmm_async",
        "rmm_track_allocations",
        "rmm_allocator_external_lib_list",
    ),
    "cudf": ("enable_cudf_spill",),
}


def worker_class_for(kind: str, worker_class: str | type) -> type:
    """The class of a worker of this `kind` (``"gpu"`` or ``"cpu"``), imported."""
    if worker_class == "auto":
        return import_worker_class("dask_cuda.CUDAWorker" if kind == "gpu" else "distributed.Nanny")
    if kind == "cpu" and _may_be_cuda_worker(worker_class):
        # --cpu-workers beside GPU workers
        return import_worker_class("distributed.Nanny")
    return import_worker_class(worker_class)


def tasks_run_in_agent(worker_class: str | type) -> bool:
    """Whether workers of this class run their tasks in the agent itself, and not in a process of a Nanny.

    ``"auto"`` is CUDAWorker or Nanny, worker by worker as the plan says. A CUDAWorker is no Nanny, but makes some.
    """
    if worker_class == "auto":
        return False
    from distributed import Nanny

    cls = import_worker_class(worker_class)
    return not (issubclass(cls, Nanny) or is_cuda_worker(cls))


def _may_be_cuda_worker(worker_class: str | type) -> bool:
    return worker_class == "auto" or is_cuda_worker(import_worker_class(worker_class))


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
    if is_cuda_worker(cls):
        return _make_cuda_worker(cls, plan, settings, base, options)
    if issubclass(cls, (distributed.Nanny, distributed.Worker)):
        base |= {"host": settings.host, "protocol": str(settings.protocol), "dashboard": False}
        base["dashboard_address"] = "127.0.0.1:0"  # plain HTTP, with or without a dashboard
        base["death_timeout"] = settings.death_timeout
        if plan.resources:
            base["resources"] = dict(plan.resources)
        if plan.kind == "cpu" and _may_be_cuda_worker(settings.worker_class):
            # Without a GPU, and beside GPU workers, the same command gives CPU workers: what only CUDAWorker knows is not theirs.
            known = accepted_options(cls)
            options = {key: value for key, value in options.items() if known is None or key in known}
        if plan.kind == "gpu" and plan.device is not None:
            base["env"] = {**shown_transports(), VISIBLE_DEVICES: plan.device}
        elif settings.device_memory and issubclass(cls, distributed.Nanny):
            # a CPU worker beside GPU workers must not touch their devices
            base["env"] = {**hidden_transports(), VISIBLE_DEVICES: ""}
        if plan.kind == "cpu" and cls is distributed.Nanny:
            # Its worker would show the first GPU's memory and load as its own. And to ask for RMM's initialises CUDA, one process
            # after the other: 32 workers of a host took two seconds.
            base["config"] = {"distributed.diagnostics.nvml": False}
            base["metrics"] = {}
        if issubclass(cls, distributed.Worker):
            base.pop("env", None)
        # a CPU worker is to make no context either
        with users_config() if plan.kind == "gpu" else nullcontext():
            return cls(settings.address, **_merge(base, options))
    # A class of the user's: dask-mpi's six options, the scheduler through the Dask configuration, as dask-mpi has it.
    base |= {"interface": settings.interface, "protocol": str(settings.protocol)}
    return cls(**_merge(base, options))


def measure_less(nanny: Any) -> None:
    """Leave out what a nanny measures of itself, before it starts: its event loop, and its process, which nobody reads.

    The one is 50 wake-ups a second, 1.5 % of a core, for a warning; the other two of them, 0.1 %. What scheduler and workers
    measure stays, and so does the nanny's look at its worker's memory.
    """
    callbacks = getattr(nanny, "periodic_callbacks", {})
    for name in ("tick", "ticks", "monitor"):
        callbacks.pop(name, None)


def kill_at_once() -> None:
    """Have nannies kill a worker where Dask's send it SIGTERM: above its memory limit, and when it has not come up.

    Our workers leave SIGTERM to the rank (`boot.ignore_signals`); Dask's have no handler, and it ends them as SIGKILL does.
    """
    with suppress(ImportError, AttributeError):
        from distributed.process import AsyncProcess

        AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


def listen_on_tcp(nanny: Any) -> None:
    """Have a nanny of a worker over UCX, before it starts, listen on TCP: it moves no data, and UCX keeps a core busy there."""
    # What its worker is told has been settled by its constructor.
    if getattr(nanny, "_protocol", None) == "ucx":
        nanny._protocol = "tcp"


def _merge(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options win, except that environments, resources and configurations are added to ours."""
    merged = {**base, **options}
    for key in ("env", "resources", "config"):
        if isinstance(base.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**base[key], **options[key]}
    return merged


def _make_cuda_worker(
    cls: type, plan: WorkerPlan, settings: WorkerSettings, base: dict[str, Any], options: dict[str, Any]
) -> Any:
    from dask_cuda.plugins import CPUAffinity

    assert plan.device is not None  # a GPU worker has a device: the plan's own invariant
    _check_modules(plan, options)
    _make_directory(plan, options.get("rmm_log_directory"))
    memory = settings.device_memory.get(plan.devices[0], 0)
    options = {"device_memory_limit": "default", **options}
    if memory:
        for key, alignment in DEVICE_SIZES.items():
            if key in options:
                options[key] = device_bytes(options[key], memory, alignment)
    resources = " ".join(f"{key}={value:g}" for key, value in plan.resources.items())
    if options.get("resources"):
        resources = f"{resources} {options.pop('resources')}"
    base |= {
        "scheduler": settings.address,
        "host": settings.host,
        "protocol": str(settings.protocol),
        "resources": resources,
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": settings.death_timeout,
    }
    switched = any(options.get(switch) is not None for switch in SWITCHES)
    # CUDAWorker sets it in this process, too, where it would make a context
    with visible_device(plan.devices[0]), users_config():
        worker = cls(**_merge(base, options))
        for nanny in worker.nannies:
            nanny.config = _workers_config(nanny.config, switched=switched)
    for nanny in worker.nannies:
        nanny.env = {**nanny.env, **shown_transports(), VISIBLE_DEVICES: plan.device}
        plugins = nanny.worker_kwargs.get("plugins", set())
        for plugin in plugins:
            if isinstance(plugin, CPUAffinity):
                plugin.cores = list(plan.cpus)
        nanny.worker_kwargs["plugins"] = {*plugins, *worker_plugins(plan, settings)}
    return worker


def _workers_config(config: Mapping[str, Any], *, switched: bool) -> dict[str, Any]:
    """What a worker's process is told: a copy, and said once how connections are made, which the switches say already."""
    import dask

    key = dask.config.canonical_name(SECTION, dict(config))
    section = copy.deepcopy(config.get(key)) or {}
    if switched:
        (section.get("environment") or {}).pop("sockaddr-tls-priority", None)
    return {**config, key: section}


def _check_modules(plan: WorkerPlan, options: Mapping[str, Any]) -> None:
    """Refuse options whose modules are not installed here."""
    missing = {
        module: next(name for name in names if options.get(name))
        for module, names in MODULES.items()
        if any(options.get(name) for name in names) and find_spec(module) is None
    }
    imports: Iterable[str] = options.get("pre_import") or ()
    missing |= {name: "pre_import" for name in imports if find_spec(name.partition(".")[0]) is None}
    for module, option in missing.items():
        raise InputError(
            f"worker_options: {option} of worker {plan.name} on {plan.host} needs the module {module!r}, which is not installed "
            f"there; install it ({'dask-gpu-mpi[cuda12] or [cuda13]' if module == 'rmm' else module}), or leave the option out"
        )


def _make_directory(plan: WorkerPlan, directory: str | None) -> None:
    """RMM writes its logs into this directory, and ends the worker where there is none."""
    try:
        if directory:
            os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"worker_options: rmm_log_directory {directory!r} can't be made on {plan.host} ({error.strerror}); "
            "needed: a directory that can be written there"
        ) from None


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
    before = os.environ.get(VISIBLE_DEVICES)
    os.environ[VISIBLE_DEVICES] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE_DEVICES]
        else:
            os.environ[VISIBLE_DEVICES] = before
