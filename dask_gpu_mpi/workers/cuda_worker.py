"""A `dask_cuda.CUDAWorker` from its line of the plan.

CUDAWorker knows nothing of ranks. Its behaviour is corrected here, and nowhere else (dask-cuda 25.10 to 26.10):

- It makes a worker for every visible GPU. Here each is made with one GPU visible, by UUID: its name and the device of its limits
  are right, and CUDA makes a context with one device (half a second instead of two on four GPUs). A worker of several GPUs is
  made with its first one visible; then its nanny shows its process all of them.
- It sets the GPU's CPU affinity, whatever the rank was bound to. Here it sets the plan's cores.
- It imports cuDF in each worker, 1.4 seconds of the start, to switch spilling on or off. Here only to switch it on.
- Fractions of device memory mean NVML's device 0, or the parent of a MIG slice. The plan has bytes of the worker's device.
- ``resources`` must be a string, and a string for ``preload`` is iterated by character: see `worker_options`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from dask_gpu_mpi.base.files import make_folder
from dask_gpu_mpi.base.streams import environment
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.network.ucx import SECTION, shown_transports, users_config
from dask_gpu_mpi.options.model import SWITCHES
from dask_gpu_mpi.plan.model import WorkerPlan

#: Modules that CUDAWorker imports in the worker for options; a missing one would be a traceback there, or (cuDF) ignored.
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
#: Options that are lists of modules.
IMPORTS = ("pre_import", "rmm_allocator_external_lib_list")


def make_cuda_worker(cls: type, plan: WorkerPlan, options: Mapping[str, Any], plugins: Iterable[Any]) -> Any:
    """Make a CUDAWorker with these keywords and, for its nannies, these plugins.

    Raises an InputError if an option needs a module that is not installed, or a directory that can't be made.
    """
    from dask_cuda.plugins import CPUAffinity, CUDFSetup

    _check_modules(plan, options)
    _make_directory(plan, options.get("rmm_log_directory"))
    # CUDAWorker gives its nannies its variables only
    options = dict(options)
    variables = options.pop("env", None) or {}
    switched = any(options.get(switch) is not None for switch in SWITCHES)
    # CUDAWorker sets it in this process, too, where it would make a context
    with environment({VISIBLE_DEVICES: plan.devices[0]}), users_config():
        try:
            worker = cls(**options)
        except ValueError as error:
            # releases differ in what they refuse: 25.10 a maximum pool without a pool, for example
            raise InputError(
                f"worker_options: worker {plan.name} on {plan.host} can't be made: {error}",
                fix="correct or remove that option",
            ) from error
        for nanny in worker.nannies:
            nanny.config = _workers_config(nanny.config, switched=switched)
    for nanny in worker.nannies:
        nanny.env = {**nanny.env, **variables, **shown_transports(), VISIBLE_DEVICES: plan.device}
        own = nanny.worker_kwargs.get("plugins", set())
        for plugin in list(own):
            if isinstance(plugin, CPUAffinity):
                plugin.cores = list(plan.cpus)
            elif isinstance(plugin, CUDFSetup) and not plugin.spill:
                own.discard(plugin)
        nanny.worker_kwargs["plugins"] = {*own, *plugins}
    return worker


def _workers_config(config: Mapping[str, Any], *, switched: bool) -> dict[str, Any]:
    """A copy of Dask's configuration for a worker's process; `switched`: connections follow CUDAWorker's switches alone."""
    import dask

    key = dask.config.canonical_name(SECTION, dict(config))
    section = copy.deepcopy(config.get(key)) or {}
    if switched:
        (section.get("environment") or {}).pop("sockaddr-tls-priority", None)
    return {**config, key: section}


def _check_modules(plan: WorkerPlan, options: Mapping[str, Any]) -> None:
    """Refuse options whose modules are not installed here."""
    wanted = {name: module for module, names in MODULES.items() for name in names if options.get(name)}
    imports = [(option, name) for option in IMPORTS for name in options.get(option) or ()]
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
