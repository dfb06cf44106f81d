"""A sample of the tasks that have run, of bounded size: one of every so many, by chance, and the longest.

What Dask's `TaskStreamPlugin` keeps is all of the last tasks; of a long job that is its end.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ACTIONS", "TaskStream"]

#: What a rectangle may be: Dask's actions, and a computation that has failed.
ACTIONS = ("compute", "failed", "transfer", "disk-read", "disk-write", "deserialize", "other")
_PLACE = {action: place for place, action in enumerate(ACTIONS)}
#: Rectangles, and longest tasks, that are kept.
MOST, LONGEST = 20_000, 1_000
#: Rectangles of one task, names of tasks, and lanes of one worker that are kept.
MOST_OF_TASK, MOST_NAMES, MOST_LANES = 32, 2_000, 256

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
        if name not in self._names and len(self._names) >= MOST_NAMES:
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
