"""How much of a GPU's memory its worker uses, in bytes, and whether the GPU has that much."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.text import format_bytes, parse_bytes
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import LARGEST

if TYPE_CHECKING:
    from dask_gpu_mpi.machine.gpus import Gpu
    from dask_gpu_mpi.options.model import Options
    from dask_gpu_mpi.plan.model import HostPlan, WorkerPlan

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


def device_options(options: Options) -> dict[str, Any]:
    """The worker options that are about device memory, as the user wrote them, if the class may be CUDAWorker.

    Ranks send them to rank 0, whose plan reads them (`device_sizes`). A value that no message can have is left out.
    """
    if options.worker_kind == "cpu":
        return {}
    asked = {key: options.worker_options[key] for key in DEVICE_SIZES if key in options.worker_options}
    sizes = {key: value for key, value in asked.items() if value is None or _can_be_sent(value)}
    return {**sizes, MANAGED: True} if options.worker_options.get(MANAGED) is True else sizes


def _can_be_sent(value: Any) -> bool:
    if isinstance(value, Integral):
        return not isinstance(value, bool) and 0 <= int(value) < LARGEST
    return isinstance(value, (float, str))


def device_sizes(asked: Mapping[str, Any], memory: int) -> dict[str, int]:
    """Bytes of a worker's own device for each size of `DEVICE_SIZES` in `asked` (`device_options`): read here, and nowhere else.

    `memory`: bytes of the device (of its slice, under MIG). If it is unknown (0), nothing is. None for a size leaves it to
    dask-cuda. A value that is no size is left out: the check of worker options reports it, or it means something else in a class
    of the user's.

    >>> device_sizes({"rmm_pool_size": 0.5, "rmm_maximum_pool_size": "much"}, 80 * 10**9)
    {'device_memory_limit': 64000000000, 'rmm_pool_size': 40000000000}
    """
    if not memory:
        return {}
    asked = {"device_memory_limit": "default", **asked}
    found: dict[str, int] = {}
    for key, alignment in DEVICE_SIZES.items():
        if asked.get(key) is not None:
            with contextlib.suppress(ValueError):
                size = device_bytes(asked[key], memory, alignment)
                if 0 <= size < LARGEST:
                    found[key] = size
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


def check_device_memory(
    hosts: Iterable[HostPlan], workers: Iterable[WorkerPlan], asked: Mapping[int, Mapping[str, Any]]
) -> None:
    """Refuse sizes that a GPU does not have, before the plan is carried out: RMM would report that in a worker's traceback.

    A pool is taken at once, so it must fit into what is free now; its maximum and the limit of the device must fit into the
    device. Managed memory may be more than the device has: none of this holds for it.

    `asked`: for each rank the options of its workers (`device_options`). The OptionError has the GPU, its host, its worker, its
    free memory, and a value that would fit.
    """
    gpus = {(host.host, gpu.uuid): gpu for host in hosts for gpu in host.gpus}
    problems: list[tuple[WorkerPlan, Gpu, str, str, int]] = []
    for worker in workers:
        options = asked.get(worker.rank, {})
        if worker.device_sizes and not options.get(MANAGED):
            gpu = gpus[worker.host, worker.devices[0]]
            if problem := _problem(options, worker.device_sizes, gpu):
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
        f"has {gpu.memory} bytes ({format_bytes(gpu.memory)}), free: {free}",
        expected=f"{fits!r} at most" if fits else "",
        fix="" if fits else "end what uses this GPU, or leave the option out",
    )


def _problem(options: Mapping[str, Any], sizes: Mapping[str, int], gpu: Gpu) -> tuple[str, str, int] | None:
    """The option that can't be had, its size and why, and the bytes that could be had."""

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
