"""Bounded samples for the report: time series, the task stream and transfers."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

# Measurements over time that stay small however long the job: at a bound every second one goes, and the interval doubles.

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


# A sample of the tasks that have run, of bounded size: one of every so many, by chance, and the longest.
#
# What Dask's `TaskStreamPlugin` keeps is all of the last tasks; of a long job that is its end.

#: What a rectangle may be: Dask's actions, and a computation that has failed.
ACTIONS = ("compute", "failed", "transfer", "disk-read", "disk-write", "deserialize", "other")
_PLACE = {action: place for place, action in enumerate(ACTIONS)}
#: Rectangles, and longest tasks, that are kept.
MOST, LONGEST = 20_000, 1_000
#: Rectangles of one task, names of tasks, and lanes of one worker that are kept.
MOST_OF_TASK, MOST_TASK_NAMES, MOST_LANES = 32, 2_000, 256

#: Begin, end, lane, name, action.
Rectangle = tuple[float, float, int, int, int]


class TaskStream:
    """The sample.

    Parameters
    ----------
    most, longest : int
        Bounds: rectangles of the sample, tasks of the longest.

    Attributes
    ----------
    seen : int
        Tasks that have run.
    stride : int
        Of so many tasks one is in the sample that chance makes: what recurs in the order of tasks must not recur in the sample.
    """

    def __init__(self, *, most: int = MOST, longest: int = LONGEST) -> None:
        self.seen = 0
        self.stride = 1
        self._most = most
        self._longest = longest
        self._rectangles = 0
        self._chance = random.Random(0)
        #: Random number of the task, its number, and its rectangles.
        self._kept: list[tuple[int, int, list[Rectangle]]] = []
        #: Length, random number (of tasks that are as long some are kept from all over the job), number, rectangles: a heap.
        self._long: list[tuple[float, int, int, list[Rectangle]]] = []
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[str, int], int] = {}
        #: By worker: the lane of each of its threads.
        self._threads: dict[str, dict[Any, int]] = {}

    def add(
        self, worker: str, thread: Any, name: str, startstops: Sequence[Mapping[str, Any]], *, failed: bool
    ) -> None:
        """Add a task that has run, with what its worker did for it and when."""
        self.seen += 1
        if not startstops:
            return
        begin = min(each["start"] for each in startstops)
        length = max(each["stop"] for each in startstops) - begin
        chance = self._chance.getrandbits(32)
        sampled = chance % self.stride == 0
        is_long = len(self._long) < self._longest or (self._long and (length, chance) > self._long[0][:2])
        if not sampled and not is_long:
            return
        lane, place = self._lane(worker, thread), self._name(name)
        rectangles = [
            (each["start"], each["stop"], lane, place, _action(each["action"], failed))
            for each in startstops[-MOST_OF_TASK:]
        ]
        if sampled:
            self._kept.append((chance, self.seen, rectangles))
            self._rectangles += len(rectangles)
            if self._rectangles > self._most:
                self._thin()
        if is_long:
            add = heapq.heappush if len(self._long) < self._longest else heapq.heapreplace
            add(self._long, (length, chance, self.seen, rectangles))

    def restarted(self, worker: str) -> None:
        """A worker has a new process, whose threads take the place of the old ones."""
        self._threads.pop(worker, None)

    def _lane(self, worker: str, thread: Any) -> int:
        threads = self._threads.setdefault(worker, {})
        if (
            thread not in threads and len(threads) < MOST_LANES
        ):  # each task that secedes leaves a new thread behind
            threads[thread] = len(threads)
        return self._lanes.setdefault((worker, threads.get(thread, MOST_LANES - 1)), len(self._lanes))

    def _name(self, name: str) -> int:
        if name not in self._names and len(self._names) >= MOST_TASK_NAMES:
            name = "other"
        return self._names.setdefault(name, len(self._names))

    def _thin(self) -> None:
        while self._rectangles > self._most // 2:
            self.stride *= 2
            self._kept = [task for task in self._kept if task[0] % self.stride == 0]
            self._rectangles = sum(len(rectangles) for *_, rectangles in self._kept)

    def packed(self, since: float) -> dict[str, Any]:
        """As a message carries it: columns, packed; times in seconds after `since`."""
        tasks = {number: rectangles for _, _, number, rectangles in self._long}
        tasks |= {number: rectangles for _, number, rectangles in self._kept}
        rectangles = sorted(rectangle for each in tasks.values() for rectangle in each)
        return {
            "seen": self.seen,
            "shown": len(tasks),
            "stride": self.stride,
            "longest": len(self._long),
            "names": list(self._names),
            "lanes": [list(lane) for lane in self._lanes],
            "start": array("d", [each[0] - since for each in rectangles]).tobytes(),
            "length": array("f", [max(0.0, each[1] - each[0]) for each in rectangles]).tobytes(),
            "lane": array("i", [each[2] for each in rectangles]).tobytes(),
            "name": array("i", [each[3] for each in rectangles]).tobytes(),
            "action": array("b", [each[4] for each in rectangles]).tobytes(),
        }


def _action(action: str, failed: bool) -> int:
    if action == "compute" and failed:
        action = "failed"
    return _PLACE.get(action, _PLACE["other"])


# Data between workers, added up by sender and receiver; where there are too many pairs of workers, by node.

#: Pairs that are kept.
MOST_PAIRS = 20_000


class Transfers:
    """The sums.

    Examples
    --------
    >>> transfers = Transfers(most=1)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 100, 0.5)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 50, 0.5)
    >>> transfers.as_rows()
    [['0-0', '1-0', 2, 150, 1.0]]
    >>> transfers.add(("0-0", "a"), ("1-1", "b"), 10, 0.5)
    >>> transfers.by, transfers.as_rows()
    ('node', [['a', 'b', 3, 160, 1.5]])
    """

    def __init__(self, most: int = MOST_PAIRS) -> None:
        #: Whether the pairs are workers or nodes: ``"worker"`` or ``"node"``.
        self.by = "worker"
        self._most = most
        #: By sender and receiver, each worker and node: number, bytes, seconds.
        self._pairs: dict[tuple[tuple[str, str], tuple[str, str]], list[float]] = {}

    def add(self, sender: tuple[str, str], receiver: tuple[str, str], size: int, seconds: float) -> None:
        """Add a transfer between two workers, each with its node."""
        self._add(sender, receiver, 1, size, seconds)
        if len(self._pairs) > self._most and self.by == "worker":
            self.by = "node"
            pairs, self._pairs = self._pairs, {}
            for (one, other), (number, bytes_, seconds_) in pairs.items():
                self._add(one, other, number, bytes_, seconds_)

    def _add(
        self, sender: tuple[str, str], receiver: tuple[str, str], number: float, size: float, seconds: float
    ) -> None:
        if self.by == "node":
            sender, receiver = (sender[1], sender[1]), (receiver[1], receiver[1])
            if len(self._pairs) >= self._most and (sender, receiver) not in self._pairs:
                sender = receiver = ("other", "other")
        sums = self._pairs.setdefault((sender, receiver), [0, 0, 0.0])
        sums[0] += number
        sums[1] += size
        sums[2] += seconds

    def as_rows(self) -> list[list[Any]]:
        """Sender, receiver, number of transfers, bytes, seconds."""
        return [[sender[0], receiver[0], *sums] for (sender, receiver), sums in self._pairs.items()]
