"""How much of a GPU's memory its worker takes, and whether the GPU has that much."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.sizes import format_bytes, parse_bytes
from dask_gpu_mpi.errors import OptionError

if TYPE_CHECKING:
    from dask_gpu_mpi.machine.gpus import Gpu
    from dask_gpu_mpi.options.model import Options

    from .model import WorkerPlan
    from .plan import Plan

__all__ = ["DEVICE_SIZES", "check_device_memory", "device_bytes", "device_options"]

#: Options of CUDAWorker that are sizes of device memory or fractions of it, and the alignment that RMM requires of them (bytes).
DEVICE_SIZES = {
    "device_memory_limit": 1,
    "rmm_pool_size": 256,
    "rmm_maximum_pool_size": 256,
    "rmm_release_threshold": 256,
}
#: dask-cuda's "default" for device_memory_limit (dask_cuda.utils.parse_device_memory_limit).
DEFAULT_FRACTION = 0.8
#: Part of the free memory that a message proposes for a pool: the worker's context and kernels need some too.
PROPOSED_FRACTION = 0.9


def device_options(options: Options) -> dict[str, Any]:
    """The worker options that are about device memory, as far as the class is CUDAWorker (or may become it)."""
    if options.worker_class != "auto" and options.worker_kind != "gpu":
        return {}
    keys = (*DEVICE_SIZES, "rmm_managed_memory")
    return {key: options.worker_options[key] for key in keys if key in options.worker_options}


def device_bytes(value: Any, memory: int, alignment: int = 1) -> Any:
    """Turn a size of device memory, a fraction among them, into bytes.

    Parameters
    ----------
    value : int, float, str or None
        ``"default"`` = 0.8, ``"auto"`` = all, a float or its text in (0, 1] = that fraction; the rule is dask-cuda's
        (``parse_device_bytes``), where 1 (int or ``"1"``) is one byte and 1.0 everything.
    memory : int
        Bytes of the worker's own device (of its slice, under MIG).
    alignment : int
        Bytes; the result is a multiple.

    Returns
    -------
    int or None
        Bytes; 0 and None as they are.

    Examples
    --------
    >>> memory = 80 * 10**9
    >>> device_bytes("default", memory), device_bytes(0.5, memory), device_bytes("10GB", memory, alignment=256)
    (64000000000, 40000000000, 10000000000)
    >>> device_bytes(1, memory), device_bytes(1.0, memory)
    (1, 80000000000)
    """
    if value is None:
        return None
    if value == "default":
        value = DEFAULT_FRACTION
    elif value == "auto":
        value = 1.0
    fraction = 0.0
    if isinstance(value, float) or (isinstance(value, str) and value.strip() != "1"):
        with contextlib.suppress(ValueError):
            fraction = float(value)
    if 0.0 < fraction <= 1.0:
        value = memory * fraction
    if value in (math.inf, -math.inf):
        raise ValueError(f"{value!r} is no number of bytes (expected 4GB, 1.5GiB or the like)")
    size = parse_bytes(value) if isinstance(value, str) else int(value)
    return size // alignment * alignment


def check_device_memory(plan: Plan, asked: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse sizes that a GPU does not have, before the plan is carried out: RMM would report that in a worker's traceback.

    A pool is taken at once, so it must fit into what is free now; its maximum and the limit of the device must fit into the
    device. Managed memory may be more than the device has: none of this holds for it.

    Parameters
    ----------
    plan : Plan
        Where every worker is.
    asked : mapping
        For each rank the options of its workers (`device_options`).

    Raises
    ------
    OptionError
        Names the GPU, its host, its worker, its free memory, and a value that would fit.
    """
    gpus = {(host.host, gpu.uuid): gpu for host in plan.hosts for gpu in host.gpus}
    problems: list[tuple[WorkerPlan, Gpu, str, str, int]] = []
    for worker in plan.workers:
        options = asked.get(worker.rank, {})
        if worker.kind == "gpu" and options and not options.get("rmm_managed_memory"):
            gpu = gpus[worker.host, worker.devices[0]]
            if gpu.memory and (problem := _problem(options, gpu)):
                problems.append((worker, gpu, *problem))
    if not problems:
        return
    worker, gpu, option, text, _ = problems[0]
    fitting = [fits for *_, other, _, fits in problems if other == option]
    others = f" (and {len(fitting) - 1} more)" if len(fitting) > 1 else ""
    fits = _rounded_down(min(fitting))
    free = f"{gpu.free} bytes ({format_bytes(gpu.free)})" if gpu.free >= 0 else "unknown"
    raise OptionError(
        f"worker_options: {option} of worker {worker.name} on {worker.host}{others} is {text}: GPU {gpu.index} ({gpu.uuid}) "
        f"has {gpu.memory} bytes ({format_bytes(gpu.memory)}), free: {free}"
        + (
            f" (expected {fits!r} at most)"
            if fits
            else ". Fix: end what uses this GPU, or leave the option out"
        )
    )


def _problem(options: Mapping[str, Any], gpu: Gpu) -> tuple[str, str, int] | None:
    """The option that can't be had, its size and why, and the bytes that could be had."""
    sizes = {
        key: device_bytes(options[key], gpu.memory, alignment) or 0
        for key, alignment in DEVICE_SIZES.items()
        if key in options
    }

    def described(key: str) -> str:
        return f"{options[key]!r} ({format_bytes(sizes[key])})"

    for key in ("device_memory_limit", "rmm_maximum_pool_size"):
        if sizes.get(key, 0) > gpu.memory:
            return key, f"{described(key)}, more than its GPU has", gpu.memory
    pool, maximum = sizes.get("rmm_pool_size", 0), sizes.get("rmm_maximum_pool_size", 0)
    available = gpu.memory if gpu.free < 0 else gpu.free
    if pool > available:
        limit = "its GPU has" if gpu.free < 0 else "is free"
    elif 0 < maximum < pool:
        limit = f"rmm_maximum_pool_size, {described('rmm_maximum_pool_size')}"
    else:
        return None
    fits = int(PROPOSED_FRACTION * available)
    return "rmm_pool_size", f"{described('rmm_pool_size')}, more than {limit}", min(fits, maximum or fits)


def _rounded_down(size: int) -> str:
    """The size as a text, in whole GiB or MiB; empty: less than a MiB."""
    if size >= 2 * 1024**3:
        return f"{size // 1024**3} GiB"
    return f"{size // 1024**2} MiB" if size >= 1024**2 else ""
