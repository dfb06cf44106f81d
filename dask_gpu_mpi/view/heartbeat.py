"""Figures in workers' heartbeats: read for `top` and for the report, and kept over time for the report (`Measurements`).

A worker that is not ours may send anything, so each figure is checked where it is read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

from dask_gpu_mpi.base.timeline import METRIC
from dask_gpu_mpi.machine.nvidia import FIGURES

#: The kinds of work in a report: Dask's actions, and a computation that has failed.
ACTIONS = ("compute", "failed", "transfer", "disk-read", "disk-write", "deserialize", "other")
#: GPUs of one worker of which measurements are kept.
MOST_GPUS = 16
#: More is not a figure: it would not be kept, or written as JSON.
_LARGEST = 2.0**100


def gpus_of(metrics: Mapping[str, Any], started: Any = None) -> list[dict[str, Any]]:
    """The `FIGURES` of each GPU of a worker, from its last heartbeat; `started`: the figures of its GPU from its start.

    None, or missing: not known.

    >>> gpus_of({"gpu_utilization": 9, "gpu_memory_used": 8})
    [{'use': 9, 'memory': 8, 'memory_total': None}]
    >>> gpus_of({"gpu_utilization": 9, "gpu_mpi": {"gpus": [[1, 2, 3, 4], [5, 6, 7]]}})
    [{'use': 1, 'memory': 2, 'memory_total': 3, 'power': 4}, {'use': 5, 'memory': 6, 'memory_total': 7}]
    """
    several = mapping(metrics.get(METRIC)).get("gpus")
    if isinstance(several, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in several):
        return [dict(zip(FIGURES, map(number, figures), strict=False)) for figures in several]
    # From distributed's monitor of the worker's process. Its metric "gpu" is for processes that had NVML before their
    # worker was made.
    gpu = mapping(metrics.get("gpu"))
    return [
        {
            "use": number(metrics.get("gpu_utilization", gpu.get("utilization"))),
            "memory": number(metrics.get("gpu_memory_used", gpu.get("memory-used"))),
            "memory_total": number(metrics.get("gpu-memory-total", mapping(started).get("memory-total"))),
        }
    ]


def spilled_of(metrics: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The bytes that a worker has spilled to disk, and from its GPU; None: not known.

    >>> spilled_of({"spilled_bytes": {"memory": 7, "disk": 5}})
    (5, None)
    >>> spilled_of({"spilled_bytes": {"memory": 0, "disk": 0}, "gpu_mpi": {"spilled": 9}})
    (None, 9)
    """
    ours = mapping(metrics.get(METRIC))
    if "spilled" in ours:  # a store that distributed does not measure: its figure is always 0
        return None, integer(ours["spilled"])
    return integer(mapping(metrics.get("spilled_bytes")).get("disk")), None


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
    to_disk, from_gpu = spilled_of(metrics)
    found: dict[str, Any] = {
        "cpu": metrics.get("cpu"),
        "memory": metrics.get("memory"),
        "managed": metrics.get("managed_bytes"),
        "spilled": to_disk,
        "gpu_spilled": from_gpu,
        "rmm": mapping(metrics.get("rmm")).get("rmm-used"),
        "cudf_spilled": mapping(metrics.get("cudf")).get("cudf-spilled"),
    }
    for place, gpu in enumerate(gpus_of(metrics)[:MOST_GPUS]):
        found[of_gpu("gpu", place)] = gpu.get("use")
        for quantity in ("memory", "power", "temperature", "slowed", "pcie", "nvlink"):
            found[of_gpu(f"gpu_{quantity}", place)] = gpu.get(quantity)
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


# Measurements over time, in bounded memory.

#: Points in time that are kept, and workers of which values are kept: less than 7 MB with fourteen quantities.
MOST_TIMES, MOST_NAMES = 720, 160
_NAN = math.nan


class Measurements:
    """The figures of all workers: a `Series`, the peaks of all heartbeats, and the energy that GPUs have used."""

    def __init__(self, interval: float) -> None:
        self._series = Series(interval)
        #: By worker and quantity.
        self.peaks: dict[str, dict[str, float]] = {}
        #: By worker, for each of its GPUs: the first and the last reading of its energy, in J.
        self._energy: dict[str, list[tuple[float, float] | None]] = {}

    def add(self, now: float, metrics: Mapping[str, Mapping[str, Any]], *, last: bool) -> None:
        """Add the last heartbeat of each worker; `last`: as a point of the series, even if it is not time for one yet."""
        rows = {name: measured(each) for name, each in metrics.items()}
        for name, values in rows.items():
            peaks = self.peaks.setdefault(name, {})
            for quantity, value in values.items():
                # not of bits: the largest number means nothing
                if value > peaks.get(quantity, -1.0) and not quantity.startswith("gpu_slowed"):
                    peaks[quantity] = value
            energy = self._energy.setdefault(name, [])
            for place, gpu in enumerate(gpus_of(metrics[name])[:MOST_GPUS]):
                if place == len(energy):
                    energy.append(None)
                if (reading := gpu.get("energy")) is not None:
                    before = energy[place]
                    energy[place] = (reading if before is None else before[0], reading)
        if last or self._series.due(now):
            self._series.add(now, rows)

    def energy(self, name: str) -> list[float | None]:
        """J that each of a worker's GPUs has used; None: not known."""
        readings = self._energy.get(name, ())
        return [None if each is None else round(max(0.0, each[1] - each[0]), 1) for each in readings]

    def packed(self) -> dict[str, Any]:
        """The series, for a message."""
        return self._series.packed()


class Series:
    """Values of several quantities of many workers, at common points in time that are at least `interval` seconds apart.

    At the bound every second point is removed, and the interval doubles.

    >>> series = Series(1.0, most_times=4)
    >>> for second in range(6):
    ...     if series.due(second):
    ...         series.add(second, {"0": {"cpu": second}})
    >>> series.interval, list(series.times), list(series.columns["0"]["cpu"])
    (2.0, [0.0, 2.0, 4.0], [0.0, 2.0, 4.0])
    """

    def __init__(
        self, interval: float, *, most_times: int = MOST_TIMES, most_names: int = MOST_NAMES
    ) -> None:
        self.interval = interval
        self.times = array("d")
        #: By worker and quantity: a value for each point in time; not a number: there was none.
        self.columns: dict[str, dict[str, array[float]]] = {}
        #: Workers beyond the bound.
        self.left_out: set[str] = set()
        self._most_times = most_times
        self._most_names = most_names
        self._next = -math.inf

    def due(self, now: float) -> bool:
        """Whether it is time for a point."""
        return now >= self._next

    def add(self, now: float, rows: Mapping[str, Mapping[str, float]]) -> None:
        """Add a point: by worker and quantity its values."""
        for name, values in rows.items():
            if name not in self.columns and len(self.columns) >= self._most_names:
                self.left_out.add(name)
                continue
            columns = self.columns.setdefault(name, {})
            for quantity in values:
                if quantity not in columns:
                    columns[quantity] = array("f", [_NAN]) * len(self.times)
        self.times.append(now)
        nothing: Mapping[str, float] = {}
        for name, columns in self.columns.items():
            values = rows.get(name, nothing)
            for quantity, column in columns.items():
                column.append(values.get(quantity, _NAN))
        if len(self.times) >= self._most_times:
            self._thin()
        # a little less, since the call each second comes a little late
        self._next = self.times[-1] + self.interval * 0.95

    def _thin(self) -> None:
        self.times = self.times[::2]
        for columns in self.columns.values():
            for quantity, column in columns.items():
                columns[quantity] = column[::2]
        self.interval *= 2

    def packed(self) -> dict[str, Any]:
        """For a message: times as packed float64, values as packed float32."""
        return {
            "interval": self.interval,
            "times": self.times.tobytes(),
            "values": {
                name: {quantity: column.tobytes() for quantity, column in columns.items()}
                for name, columns in self.columns.items()
            },
            "left_out": len(self.left_out),
        }
