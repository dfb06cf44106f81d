"""Measurements over time that stay small however long the job: at a bound every second one goes, and the interval doubles."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

__all__ = ["MOST_NAMES", "MOST_TIMES", "Series"]

#: Points in time that are kept, and workers of which values are kept: about 7 MB with nine quantities.
MOST_TIMES, MOST_NAMES = 720, 256
_NAN = math.nan


class Series:
    """Values of several quantities of many workers, at common points in time.

    Parameters
    ----------
    interval : float
        Least seconds between two points.
    most_times, most_names : int
        Bounds.

    Attributes
    ----------
    interval : float
        Seconds between two points by now.
    left_out : set of str
        Workers beyond the bound.

    Examples
    --------
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
        #: By worker and quantity: a value for each point in time, not a number where there was none.
        self.columns: dict[str, dict[str, array[float]]] = {}
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
        # a little less, since a clock that is asked once a second is asked a little late
        self._next = self.times[-1] + self.interval * 0.95

    def _thin(self) -> None:
        self.times = self.times[::2]
        for columns in self.columns.values():
            for quantity, column in columns.items():
                columns[quantity] = column[::2]
        self.interval *= 2

    def packed(self) -> dict[str, Any]:
        """As a message carries it: times as packed float64, values as packed float32."""
        return {
            "interval": self.interval,
            "times": self.times.tobytes(),
            "values": {
                name: {quantity: column.tobytes() for quantity, column in columns.items()}
                for name, columns in self.columns.items()
            },
            "left_out": len(self.left_out),
        }
