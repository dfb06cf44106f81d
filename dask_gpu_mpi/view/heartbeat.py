"""Figures in workers' heartbeats, for `top` and for the report. Pure functions. A worker that is not ours may send anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dask_gpu_mpi.base.timeline import METRIC

#: The kinds of work in a report: Dask's actions, and a computation that has failed.
ACTIONS = ("compute", "failed", "transfer", "disk-read", "disk-write", "deserialize", "other")
#: GPUs of one worker of which measurements are kept.
MOST_GPUS = 16
#: More is not a figure: it would not be kept, or written as JSON.
_LARGEST = 2.0**100


class GpuFigures(NamedTuple):
    """Figures of a GPU, in the order of `machine.nvidia.device_figures`; None: not known."""

    #: Percent.
    use: float | None = None
    #: Bytes.
    memory: int | None = None
    memory_total: int | None = None
    #: W and °C.
    power: float | None = None
    temperature: float | None = None
    #: The reasons for lower clocks: bits in the order of `machine.nvidia.SLOWED`.
    slowed: int | None = None
    #: J since the driver was loaded.
    energy: float | None = None
    #: Bytes per second, sent and received.
    pcie: float | None = None
    nvlink: float | None = None


class Spilled(NamedTuple):
    """Bytes that a worker has spilled; None: not known."""

    to_disk: int | None
    from_gpu: int | None


def gpus_of(metrics: Mapping[str, Any], started: Any = None) -> list[GpuFigures]:
    """The figures of each GPU of a worker, from its last heartbeat; `started`: the figures of its GPU from its start.

    >>> gpus_of({"gpu_utilization": 9, "gpu_memory_used": 8})
    [GpuFigures(use=9, memory=8, memory_total=None, power=None, ...)]
    >>> [gpu[:4] for gpu in gpus_of({"gpu_utilization": 9, "gpu_mpi": {"gpus": [[1, 2, 3, 4], [5, 6, 7]]}})]
    [(1, 2, 3, 4), (5, 6, 7, None)]
    """
    several = mapping(metrics.get(METRIC)).get("gpus")
    if isinstance(several, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in several):
        return [GpuFigures(*map(number, figures[: len(GpuFigures())])) for figures in several]
    # From distributed's monitor of the worker's process. Its metric "gpu" is for processes that had NVML before their
    # worker was made.
    gpu = mapping(metrics.get("gpu"))
    return [
        GpuFigures(
            number(metrics.get("gpu_utilization", gpu.get("utilization"))),
            number(metrics.get("gpu_memory_used", gpu.get("memory-used"))),
            number(metrics.get("gpu-memory-total", mapping(started).get("memory-total"))),
        )
    ]


def spilled_of(metrics: Mapping[str, Any]) -> Spilled:
    """The bytes that a worker has spilled.

    >>> spilled_of({"spilled_bytes": {"memory": 7, "disk": 5}})
    Spilled(to_disk=5, from_gpu=None)
    >>> spilled_of({"spilled_bytes": {"memory": 0, "disk": 0}, "gpu_mpi": {"spilled": 9}})
    Spilled(to_disk=None, from_gpu=9)
    """
    ours = mapping(metrics.get(METRIC))
    if "spilled" in ours:  # a store that distributed does not measure: its figure is always 0
        return Spilled(None, integer(ours["spilled"]))
    return Spilled(integer(mapping(metrics.get("spilled_bytes")).get("disk")), None)


def of_gpu(quantity: str, gpu: int) -> str:
    """The name of a quantity of one of a worker's GPUs, counted from 0.

    >>> of_gpu("gpu_memory", 0), of_gpu("gpu_memory", 1)
    ('gpu_memory', 'gpu_memory_1')
    """
    return quantity if gpu == 0 else f"{quantity}_{gpu}"


def measured(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The quantities that the report keeps, those that the worker reports.

    >>> measured({"cpu": 50.0, "memory": 1000, "managed_bytes": 10, "spilled_bytes": {"memory": 7, "disk": 5}})
    {'cpu': 50.0, 'memory': 1000, 'managed': 10, 'spilled': 5}
    >>> measured({"gpu_utilization": 9, "gpu_memory_used": 8, "rmm": {"rmm-used": 7, "rmm-total": None}})
    {'rmm': 7, 'gpu': 9, 'gpu_memory': 8}
    """
    spilled = spilled_of(metrics)
    found: dict[str, Any] = {
        "cpu": metrics.get("cpu"),
        "memory": metrics.get("memory"),
        "managed": metrics.get("managed_bytes"),
        "spilled": spilled.to_disk,
        "gpu_spilled": spilled.from_gpu,
        "rmm": mapping(metrics.get("rmm")).get("rmm-used"),
        "cudf_spilled": mapping(metrics.get("cudf")).get("cudf-spilled"),
    }
    for place, gpu in enumerate(gpus_of(metrics)[:MOST_GPUS]):
        found[of_gpu("gpu", place)] = gpu.use
        for quantity in ("memory", "power", "temperature", "slowed", "pcie", "nvlink"):
            found[of_gpu(f"gpu_{quantity}", place)] = getattr(gpu, quantity)
    return {quantity: value for quantity, value in found.items() if number(value) is not None}


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> Any:
    """The value if it is a number that can be a figure, else None.

    >>> number(7), number(True), number("7"), number(float("nan"))
    (7, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST < value < _LARGEST else None


def integer(value: Any) -> int | None:
    """The value as an integer if it is a number, else None."""
    found = number(value)
    return None if found is None else int(found)
