"""Makes a worker from its line of the plan, with its nannies, which start its process again; a CUDAWorker makes them itself."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import dask
from distributed import Nanny, Worker
from distributed.comm.addressing import get_address_host_port
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import get_ip

from dask_gpu_mpi.base.files import make_folder
from dask_gpu_mpi.base.streams import environment, leave_deleted_directory
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.cgroups import prefer_memory_of
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, is_profiled
from dask_gpu_mpi.network.interfaces import as_host
from dask_gpu_mpi.network.ucx import PREFERS_SYSTEM
from dask_gpu_mpi.network.worker_comm import use_streams_between_workers
from dask_gpu_mpi.options.model import Options, Protocol, WorkerUcx
from dask_gpu_mpi.plan import Start, WorkerPlan
from dask_gpu_mpi.workers.logs import log_to_file
from dask_gpu_mpi.workers.plugins import (
    GPU_FIX,
    BeforeWorker,
    FailedTransfers,
    Figures,
    ImportsOfScript,
    InWorker,
    KeylessDump,
    Label,
    TaskRanges,
    TransferSizes,
    end_as_python,
    offer_ucx,
    prepare_new_process,
    start_ucx_later,
)
from dask_gpu_mpi.workers.worker_options import (
    MODULE_LISTS,
    accepted_options,
    device_sizes,
    is_cuda_worker,
    options_for,
    worker_class_for,
)

#: Least bytes of host memory that go over UCX if the user chooses that: below, TLS is as fast.
LARGE = 65536
LOOPBACK = "127.0.0.1"
#: Options of a worker that choose its address; Dask does not accept `host` beside most of them.
ADDRESSES = ("interface", "listen_address", "contact_address")


def make_worker(
    plan: WorkerPlan, start: Start, options: Options, scratch: str
) -> tuple[Any, list[WatchedNanny]]:
    """Make the worker that `plan` describes, and its nannies: a CUDAWorker, Nanny, Worker or instance of the user's class.

    It starts when awaited.
    `start` has the values that all workers of the rank share, `options` the class and its options (`read_worker_options`).
    `scratch` is the agent's directory, in which each worker makes another. Raises an InputError if an option does not fit the
    device.
    """
    cls: Any = worker_class_for(plan.kind, options.worker_class)
    given = options_for(cls, options.worker_options)
    ours: dict[str, Any] = {
        "name": plan.name,
        "nthreads": plan.nthreads,
        "memory_limit": plan.memory_limit or None,
        "local_directory": scratch,
        "protocol": str(start.protocol),
    }
    if not (is_cuda_worker(cls) or issubclass(cls, (Nanny, Worker))):
        # The user's class: dask-mpi's six options, and the scheduler through the Dask configuration, as in dask-mpi.
        return cls(**{**ours, "interface": options.interface, **given}), []
    # If no address was chosen, the job has joined a running cluster: the address by which its scheduler is reached, unless the
    # user's options say another.
    is_free = start.listen is None and not given.keys().isdisjoint(ADDRESSES)
    facing = start.listen or get_ip(*get_address_host_port(start.address))  # type: ignore[no-untyped-call]
    start = replace(start, listen=facing)
    ours |= {
        "host": None if is_free else as_host(facing),
        # a dashboard would import bokeh in every worker; the address is for plain HTTP, with or without a dashboard
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": max(options.startup_timeout, start.limit),
    }
    plugins = [*_plugins_of_all(plan, options)]
    if is_cuda_worker(cls) or issubclass(cls, Nanny):
        plugins += _plugins_of_process(plan, start, options, scratch)
    # an argument replaces Dask's setting of the same
    resources = {**dask.config.get("distributed.worker.resources", {}), **plan.resources}
    if is_cuda_worker(cls):
        given = {"device_memory_limit": "default", **given, **device_sizes(given, plan)}
        texts = [f"{key}={value:g}" for key, value in resources.items()]
        given["resources"] = " ".join(filter(None, [*texts, given.get("resources")]))
        return make_cuda_worker(cls, plan, {**ours, "scheduler": start.address, **given}, plugins)
    if cls is Nanny:
        # The plan has chosen it, perhaps: then options that only CUDAWorker has are not for CPU workers.
        known = accepted_options(cls, given.get("worker_class")) or given
        given = {key: value for key, value in given.items() if key in known}
    given["plugins"] = {*given.get("plugins", ()), *plugins}
    if resources:
        ours["resources"] = resources
    if not issubclass(cls, Nanny):
        return cls(start.address, **_merge(ours, given)), []
    ours |= _for_nanny(cls, plan, beside_gpus=start.beside_gpus)
    with dask.config.set(UNMEASURED if "config" in ours else {}):
        nanny = watched(cls)(start.address, **_merge(ours, given))
    return nanny, [nanny]


def _plugins_of_all(plan: WorkerPlan, options: Options) -> Iterator[WorkerPlugin]:
    """The plugins of every worker, including one that runs in the agent."""
    gpu = f", GPU {plan.device}" if plan.device else ""
    yield Figures(plan.devices)
    yield KeylessDump()
    yield InWorker(end_as_python)
    yield FailedTransfers()
    label = f"[raised by worker {plan.name}, rank {plan.rank} on host {plan.host}{gpu}]"
    yield Label(label, "" if plan.device else GPU_FIX)
    if options.recorded:
        yield TransferSizes()
    if is_profiled(os.environ) and find_spec("nvtx"):
        yield TaskRanges()
    if options.log_directory is not None:
        gpu = f"-{plan.device[:12]}" if plan.device else ""
        yield InWorker(log_to_file, options.log_directory, f"worker-{plan.name}-{plan.host}{gpu}")


def _plugins_of_process(
    plan: WorkerPlan, start: Start, options: Options, scratch: str
) -> Iterator[WorkerPlugin]:
    """The plugins of a worker that has a process: one that runs in the agent must not change the agent's."""
    # a CPU worker must not use the devices of the GPU workers on its rank
    if start.transport.ucx is not WorkerUcx.OFF and not (plan.kind == "cpu" and start.beside_gpus):
        yield BeforeWorker(
            offer_ucx,
            LARGE if start.transport.ucx is WorkerUcx.ALL else 0,
            loopback=start.listen == LOOPBACK,
            leads=start.transport.between_nodes,
            warned=bool(start.transport.warning),
            devices=plan.nics,
            system=os.environ.get(PREFERS_SYSTEM),
        )
        yield InWorker(start_ucx_later)
    if start.protocol == Protocol.TLS:
        has_gpu = plan.kind == "gpu" and find_spec("rmm") is not None
        yield BeforeWorker(use_streams_between_workers, sealed=options.data_encryption, has_gpu=has_gpu)
    if plan.kind == "gpu" and start.imports:
        yield ImportsOfScript(start.imports)
    if plan.numa is not None:
        yield InWorker(prefer_memory_of, plan.numa)
    if is_profiled(os.environ):
        quiet = options.log_directory is not None
        yield BeforeWorker(prepare_new_process, options.log_level, scratch, quiet_stream=quiet)


def _for_nanny(cls: type, plan: WorkerPlan, *, beside_gpus: bool) -> dict[str, Any]:
    """Further arguments of a Nanny, for its worker's process: the devices that it sees, and its measurements."""
    ours: dict[str, Any] = {}
    if plan.device is not None:
        ours["env"] = {VISIBLE_DEVICES: plan.device}
    elif beside_gpus:
        # a CPU worker must not use the devices of GPU workers
        ours["env"] = {VISIBLE_DEVICES: ""}
    if "config" in (accepted_options(cls) or ()):  # a class of the user's may not pass it on
        ours["config"] = measured()
    if plan.kind == "cpu" and cls is Nanny:
        # Its worker would report the first GPU's memory and load. And querying RMM initialises CUDA, in one process after the
        # other: 32 workers of a node took two seconds.
        ours["config"]["distributed.diagnostics.nvml"] = False
        ours["metrics"] = {}
    return ours


def _merge(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options replace ours, but environments, resources and configurations are added to ours.

    >>> _merge({"env": {"A": "1"}, "nthreads": 1}, {"env": {"B": "2"}, "nthreads": 2})
    {'env': {'A': '1', 'B': '2'}, 'nthreads': 2}
    """
    merged = {**ours, **options}
    for key in ("env", "resources", "config"):
        if isinstance(ours.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**ours[key], **options[key]}
    return merged


# Nannies, which restart workers.

#: Dask's configuration while a nanny is made. Nannies have no GPU, and would wait for each other in the driver. They would also
#: measure their event loop (50 wake-ups a second, 1.5 % of a core) and their process (2 a second, 0.1 %). Nothing reads that.
#: They continue to watch their workers' memory.
UNMEASURED = {
    "distributed.diagnostics.nvml": False,
    "distributed.admin.tick.interval": "365 days",
    "distributed.admin.tick.cycle": "365 days",
    "distributed.admin.system-monitor.interval": "365 days",
}


def measured() -> dict[str, Any]:
    """The configuration for a nanny's worker, which measures what the user has configured."""
    return {key: dask.config.get(key) for key in UNMEASURED}


class WatchedNanny(Nanny):
    """A nanny that records why it closes and which ends were requested, and starts its worker in any working directory.

    Its methods come before those of the user's class, which may leave out ``super()``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        #: Processes whose end was requested (``client.restart()``). Their ends are not deaths.
        self.requested_ends: set[int | None] = set()
        #: Why it closes: the scheduler has closed its worker, or the nanny can't restart it. None: it does not close.
        self.closed_for: str | None = None
        configured = dask.config.get("distributed.worker.lifetime.duration", None)
        #: Whether its worker ends by itself after some time, with exit code 0, and has to be restarted then.
        self.has_lifetime = bool(options.get("lifetime") or configured)
        super().__init__(*args, **options)

    async def instantiate(self) -> Any:
        """Start the worker's process: multiprocessing can't if the working directory was deleted meanwhile."""
        leave_deleted_directory()
        return await super().instantiate()

    async def close(self, *args: Any, **options: Any) -> Any:
        """Close the worker and the nanny."""
        if self.closed_for is None:
            self.closed_for = options.get("reason", "")
        return await super().close(*args, **options)

    async def kill(self, *args: Any, **options: Any) -> None:
        """End the worker's process."""
        self.requested_ends.add(self.pid)
        await super().kill(*args, **options)


def watched(cls: type) -> type[WatchedNanny]:
    """A subclass of `WatchedNanny` and of the class `cls`."""
    return WatchedNanny if cls is Nanny else type(cls.__name__, (WatchedNanny, cls), {})


# A `dask_cuda.CUDAWorker` from its line of the plan.
#
# CUDAWorker knows nothing of ranks. Its behaviour is corrected here, and nowhere else (dask-cuda 25.10 to 26.10):
#
# - It makes a worker for every visible GPU. Here each is made with one GPU visible, by UUID: its name and the device of its
#   limits are right, and CUDA makes a context with one device (half a second instead of two on four GPUs). A worker of several
#   GPUs is made with its first one visible; then its nanny shows its process all of them.
# - Since 26.6 it gives each GPU one port of a range (`worker_port`), all others the first. Here each nanny is given the range.
# - It sets the GPU's CPU affinity, whatever the rank was bound to. Here it sets the plan's cores.
# - It imports cuDF in each worker, 1.4 seconds of the start, to switch spilling on or off. Here only to switch it on.
# - Fractions of device memory mean NVML's device 0, or the parent of a MIG slice. `device_sizes` are of the worker's device.
# - ``resources`` must be a string, and a string for ``preload`` is iterated by character: see `worker_options`.


#: Modules that CUDAWorker imports in the worker for options; a missing one would be a traceback there, or (cuDF) ignored.
_OF_RMM = "rmm_pool_size rmm_managed_memory rmm_async rmm_track_allocations rmm_allocator_external_lib_list"
MODULES = {**dict.fromkeys(_OF_RMM.split(), "rmm"), "enable_cudf_spill": "cudf"}


def make_cuda_worker(
    cls: type, plan: WorkerPlan, options: Mapping[str, Any], our_plugins: Iterable[Any]
) -> tuple[Any, list[WatchedNanny]]:
    """Make a CUDAWorker with these keywords, and its nannies with these plugins as well.

    Raises an InputError if an option needs a module that is not installed, or a directory that can't be made.
    """
    from dask_cuda.plugins import CPUAffinity, CUDFSetup

    _check_modules(plan, options)
    _make_directory(plan, options.get("rmm_log_directory"))
    # CUDAWorker gives its nannies its variables only
    options = dict(options)
    variables = options.pop("env", None) or {}
    ports = {"worker_port": options["worker_port"]} if options.get("worker_port") else {}
    module: Any = importlib.import_module("dask_cuda.cuda_worker")
    before, configured = module.Nanny, measured()
    nannies: list[WatchedNanny] = []

    def nanny(*args: Any, env: Any, plugins: Any, config: Any = None, **more: Any) -> WatchedNanny:
        """Called by CUDAWorker in place of Nanny."""
        corrected = {
            CPUAffinity(list(plan.cpus)) if isinstance(each, CPUAffinity) else each
            for each in plugins
            if not isinstance(each, CUDFSetup) or each.spill
        }
        more |= {
            "env": {**env, **variables, VISIBLE_DEVICES: plan.device},
            "plugins": corrected | set(our_plugins),
            "config": {**configured, **(config or {})},
            **ports,
        }
        nannies.append(watched(before)(*args, **more))
        return nannies[-1]

    # CUDAWorker sets this variable in this process, too, where it would make a context
    with environment({VISIBLE_DEVICES: plan.devices[0]}), dask.config.set(UNMEASURED):
        module.Nanny = nanny
        try:
            worker = cls(**options)
        finally:
            module.Nanny = before
    if not nannies:  # its processes would see other GPUs
        raise RuntimeError("this class does not make its nannies as CUDAWorker does")
    return worker, nannies


def _check_modules(plan: WorkerPlan, options: Mapping[str, Any]) -> None:
    """Refuse options whose modules are not installed here."""
    wanted = {name: module for name, module in MODULES.items() if options.get(name)}
    imports = [(option, name) for option in MODULE_LISTS for name in options.get(option) or ()]
    for option, module in (*wanted.items(), *imports):
        if find_spec(module.partition(".")[0]) is None:
            package = "dask-gpu-mpi[cuda12] or [cuda13]" if module == "rmm" else module
            raise InputError(
                f"worker_options: {option} of worker {plan.name} on {plan.host} requires the module {module!r}, which is "
                "not installed there",
                fix=f"install {package}, or leave the option out",
            )


def _make_directory(plan: WorkerPlan, directory: str | None) -> None:
    """Make the directory for RMM's logs: RMM ends the worker if it does not exist."""
    try:
        if directory:
            make_folder(directory)
    except OSError as error:
        raise InputError(
            f"worker_options: rmm_log_directory {directory!r} can't be made on {plan.host} ({error.strerror}; expected a "
            "directory that can be written there)"
        ) from None
