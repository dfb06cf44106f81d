"""How much of a GPU's memory its worker uses, in bytes, and whether the GPU has that much."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from dask_gpu_mpi.base.text import format_bytes, parse_bytes
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import show
from dask_gpu_mpi.plan.model import WorkerPlan

#: Options of CUDAWorker that are sizes of device memory or fractions of it, and the alignment that RMM requires of them (bytes).
DEVICE_SIZES = {
    "device_memory_limit": 1,
    "rmm_pool_size": 256,
    "rmm_maximum_pool_size": 256,
    "rmm_release_threshold": 256,
}
#: Whether pools may be larger than the device.
MANAGED = "rmm_managed_memory"
#: dask-cuda's "default" for device_memory_limit (dask_cuda.utils.parse_device_memory_limit).
DEFAULT_FRACTION = 0.8
#: Part of the free memory that a message proposes for a pool: the worker's context and kernels need some too.
PROPOSED_FRACTION = 0.9


def follow_cudf_spill(worker_options: Mapping[str, Any]) -> None:
    """If cuDF spills in the workers, let it do so in this process, which could not unpickle their data, and in its children."""
    if worker_options.get("enable_cudf_spill"):
        os.environ["CUDF_SPILL"] = "on"  # cuDF reads it when it is imported
        if (cudf := sys.modules.get("cudf")) is not None:
            cudf.set_option("spill", True)


def device_sizes(asked: Mapping[str, Any], worker: WorkerPlan) -> dict[str, int]:
    """Bytes of a worker's own device for each size of `DEVICE_SIZES` in its options `asked`; ``device_memory_limit`` always.

    If the memory of the device is unknown, there are none: dask-cuda reads the sizes. None for a size leaves it to dask-cuda.
    Raises an OptionError for a value that is no size, and for one that the GPU does not have, which RMM would report in a
    traceback.
    """
    found: dict[str, int] = {}
    for key, value in {"device_memory_limit": "default", **asked}.items():
        if key in DEVICE_SIZES and value is not None and worker.device_memory:
            try:
                found[key] = device_bytes(value, worker.device_memory, DEVICE_SIZES[key])
            except (TypeError, ValueError, OverflowError):
                found[key] = -1
            if found[key] < 0:
                raise OptionError(
                    f"worker_options: {key}: invalid value {show(value)}",
                    expected="bytes, a text such as '4GB', or a fraction up to 1",
                )
    if not asked.get(MANAGED):
        _check(asked, found, worker)
    return found


def device_bytes(value: int | float | str, memory: int, alignment: int = 1) -> int:
    """Turn a size of device memory, a fraction among them, into bytes.

    ``"default"`` is 0.8 of `memory`, ``"auto"`` is all of it, a float or its text in (0, 1] is that fraction. The rule is
    dask-cuda's (``parse_device_bytes``), in which 1 (int or ``"1"``) is one byte and 1.0 everything. The result is a multiple of
    `alignment` bytes.

    >>> memory = 80 * 10**9
    >>> device_bytes("default", memory), device_bytes(0.5, memory), device_bytes("10GB", memory, alignment=256)
    (64000000000, 40000000000, 10000000000)
    >>> device_bytes(1, memory), device_bytes(1.0, memory)
    (1, 80000000000)
    """
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


def _check(asked: Mapping[str, Any], sizes: Mapping[str, int], worker: WorkerPlan) -> None:
    """Refuse sizes that the GPU does not have; the OptionError has its free memory, and a value that would fit.

    A pool is taken at once, so it must fit into what is free now; its maximum and the limit of the device must fit into the
    device. Managed memory may be more than the device has: none of this holds for it.
    """
    if not (problem := _problem(asked, sizes, worker.device_memory, worker.device_free)):
        return
    option, text, fitting = problem
    fits = _rounded_down(fitting)
    memory, free = worker.device_memory, worker.device_free
    free_text = f"{free} bytes ({format_bytes(free)})" if free >= 0 else "unknown"
    raise OptionError(
        f"worker_options: {option} of worker {worker.name} on {worker.host} is {text}: GPU {worker.gpu_index} "
        f"({worker.devices[0]}) has {memory} bytes ({format_bytes(memory)}), free: {free_text}",
        expected=f"{fits!r} at most" if fits else "",
        fix="" if fits else "end what uses this GPU, or leave the option out",
    )


def _problem(
    options: Mapping[str, Any], sizes: Mapping[str, int], memory: int, free: int
) -> tuple[str, str, int] | None:
    """The option that can't be had, its size and why, and the bytes that could be had."""

    def described(key: str) -> str:
        return f"{options[key]!r} ({format_bytes(sizes[key])})"

    for key in ("device_memory_limit", "rmm_maximum_pool_size"):
        if sizes.get(key, 0) > memory:
            return key, f"{described(key)}, more than its GPU has", memory
    pool, maximum = sizes.get("rmm_pool_size", 0), sizes.get("rmm_maximum_pool_size", 0)
    available = memory if free < 0 else free
    if pool > available:
        limit = "its GPU has" if free < 0 else "is free"
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
