"""The record of a job's tasks in bounded memory: a sample of them, the data between workers, and the use of each worker's time.

`view.recorder` fills these classes. They know of Dask only its `startstops`: the actions of a worker for one task, each with
its ``action`` (``compute``, ``transfer``, ``disk-read`` ...), and ``start`` and ``stop`` in seconds since the epoch.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dask_gpu_mpi.view.heartbeat import ACTIONS

StartStops = Sequence[Mapping[str, Any]]


# The sample of tasks. Dask's `TaskStreamPlugin` keeps the last tasks, so only the end of a long job.

#: Rectangles, and longest tasks, that are kept.
MOST, LONGEST = 20_000, 1_000
#: Rectangles of one task, names of tasks, and lanes of one worker that are kept.
MOST_OF_TASK, MOST_TASK_NAMES, MOST_LANES = 32, 2_000, 256
_NUMBER_OF_ACTION = {action: number for number, action in enumerate(ACTIONS)}


class Rectangle(NamedTuple):
    """One action of a task, as the page draws it; lane, name and action are numbers of lists."""

    start: float
    stop: float
    lane: int
    name: int
    action: int


class TaskStream:
    """A sample of the tasks that have run: tasks with `most` rectangles, chosen at random, and the `longest` tasks.

    Each task gets a random number, and those with the largest numbers are kept. So each part of the job has its share, and a
    pattern in the order of tasks is not one of the sample.
    """

    def __init__(self, *, most: int = MOST, longest: int = LONGEST) -> None:
        #: Tasks that have run.
        self.seen = 0
        self._most = most
        self._longest = longest
        self._random = random.Random(0)
        #: A heap: random number of the task, its number, and its rectangles.
        self._sample: list[tuple[int, int, list[Rectangle]]] = []
        #: Rectangles in it.
        self._rectangles = 0
        #: A heap: length, random number (which chooses among tasks of the same length), number, rectangles.
        self._long: list[tuple[float, int, int, list[Rectangle]]] = []
        self._names: dict[str, int] = {}
        #: By worker and number of its thread.
        self._lanes: dict[tuple[str, int], int] = {}
        #: By worker: the number of each of its threads.
        self._threads: dict[str, dict[Any, int]] = {}

    def add(self, worker: str, thread: Any, name: str, startstops: StartStops, *, failed: bool) -> None:
        """Add a task that has run."""
        self.seen += 1
        if not startstops:
            return
        length = max(each["stop"] for each in startstops) - min(each["start"] for each in startstops)
        chance = self._random.getrandbits(32)
        in_sample = self._rectangles < self._most or chance > self._sample[0][0]
        is_long = len(self._long) < self._longest or (self._long and (length, chance) > self._long[0][:2])
        if not in_sample and not is_long:
            return
        rectangles = self._drawn(self._lane(worker, thread), self._name(name), startstops, failed=failed)
        if in_sample:
            heapq.heappush(self._sample, (chance, self.seen, rectangles))
            self._rectangles += len(rectangles)
            while self._rectangles > self._most:
                self._rectangles -= len(heapq.heappop(self._sample)[2])
        if is_long:
            heapq.heappush(self._long, (length, chance, self.seen, rectangles))
            if len(self._long) > self._longest:
                heapq.heappop(self._long)

    def restarted(self, worker: str) -> None:
        """A worker has a new process, whose threads take the lanes of the old ones."""
        self._threads.pop(worker, None)

    def _drawn(self, lane: int, name: int, startstops: StartStops, *, failed: bool) -> list[Rectangle]:
        rectangles = []
        for each in startstops[-MOST_OF_TASK:]:
            action = "failed" if failed and each["action"] == "compute" else each["action"]
            number = _NUMBER_OF_ACTION.get(action, _NUMBER_OF_ACTION["other"])
            rectangles.append(Rectangle(each["start"], each["stop"], lane, name, number))
        return rectangles

    def _lane(self, worker: str, thread: Any) -> int:
        threads = self._threads.setdefault(worker, {})
        # each task that secedes leaves a new thread behind
        if thread not in threads and len(threads) < MOST_LANES:
            threads[thread] = len(threads)
        return self._lanes.setdefault((worker, threads.get(thread, MOST_LANES - 1)), len(self._lanes))

    def _name(self, name: str) -> int:
        if name not in self._names and len(self._names) >= MOST_TASK_NAMES:
            name = "other"
        return self._names.setdefault(name, len(self._names))

    def packed(self, since: float) -> dict[str, Any]:
        """For a message: the rectangles as packed columns, with times in seconds after `since`."""
        tasks = {number: rectangles for _, _, number, rectangles in self._long}
        tasks |= {number: rectangles for _, number, rectangles in self._sample}
        rectangles = sorted(rectangle for each in tasks.values() for rectangle in each)
        return {
            "seen": self.seen,
            "shown": len(tasks),
            "stride": max(1, self.seen // max(1, len(self._sample))),
            "longest": len(self._long),
            "names": list(self._names),
            "lanes": [list(lane) for lane in self._lanes],
            "start": array("d", [each.start - since for each in rectangles]).tobytes(),
            "length": array("f", [max(0.0, each.stop - each.start) for each in rectangles]).tobytes(),
            "lane": array("i", [each.lane for each in rectangles]).tobytes(),
            "name": array("i", [each.name for each in rectangles]).tobytes(),
            "action": array("b", [each.action for each in rectangles]).tobytes(),
        }


# Data between workers.

#: Pairs that are kept.
MOST_PAIRS = 20_000


class Transfers:
    """Sums of each pair of workers; of each pair of nodes, once there are too many pairs of workers.

    >>> transfers = Transfers(most=1)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 100, 0.5)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 50, 0.5)
    >>> transfers.as_rows()
    [{'from': '0-0', 'to': '1-0', 'count': 2, 'bytes': 150, 'seconds': 1.0}]
    >>> transfers.add(("0-0", "a"), ("1-1", "b"), 10, 0.5)
    >>> transfers.by, transfers.as_rows()
    ('node', [{'from': 'a', 'to': 'b', 'count': 3, 'bytes': 160, 'seconds': 1.5}])
    """

    def __init__(self, most: int = MOST_PAIRS) -> None:
        #: Whether the pairs are workers or nodes: ``"worker"`` or ``"node"``.
        self.by = "worker"
        self._most = most
        #: By sender and receiver: number, bytes, seconds.
        self._of_workers: dict[tuple[str, str], list[float]] = {}
        self._of_nodes: dict[tuple[str, str], list[float]] = {}

    def add(self, sender: tuple[str, str], receiver: tuple[str, str], size: float, seconds: float) -> None:
        """Add a transfer between two workers, each with its node."""
        nodes = (sender[1], receiver[1])
        if len(self._of_nodes) >= self._most and nodes not in self._of_nodes:
            nodes = ("other", "other")
        _add(self._of_nodes, nodes, size, seconds)
        if self.by == "worker":
            _add(self._of_workers, (sender[0], receiver[0]), size, seconds)
            if len(self._of_workers) > self._most:
                self.by = "node"
                self._of_workers.clear()

    def as_rows(self) -> list[dict[str, Any]]:
        """The sums of each pair."""
        pairs = self._of_workers if self.by == "worker" else self._of_nodes
        return [
            {"from": sender, "to": receiver, "count": count, "bytes": size, "seconds": round(seconds, 3)}
            for (sender, receiver), (count, size, seconds) in pairs.items()
        ]


def _add(
    pairs: dict[tuple[str, str], list[float]], pair: tuple[str, str], size: float, seconds: float
) -> None:
    sums = pairs.setdefault(pair, [0, 0, 0.0])
    sums[0] += 1
    sums[1] += size
    sums[2] += seconds


# The use of time, by the job and by each worker.


class Busy:
    """The time in which the job had unfinished tasks."""

    def __init__(self) -> None:
        #: Unfinished tasks.
        self._number = 0
        #: Since when there are some; None: there are none.
        self._since: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._seconds = 0.0

    def more(self, number: int, now: float) -> None:
        """There are so many unfinished tasks more, or fewer."""
        self._number = max(0, self._number + number)
        if self._number and self._since is None:
            self._since = now
            self._first = now if self._first is None else self._first
        elif not self._number and self._since is not None:
            self._seconds += now - self._since
            self._since, self._last = None, now

    def until(self, now: float) -> dict[str, float | None]:
        """When there were some for the first and the last time, and for how many seconds."""
        if self._since is None:
            return {"first": self._first, "last": self._last, "seconds": self._seconds}
        return {"first": self._first, "last": now, "seconds": self._seconds + now - self._since}


#: Gaps between tasks of one worker that are kept, and the least of them in seconds.
MOST_GAPS, LEAST_GAP = 64, 1e-4
#: Threads of one worker whose last task is kept: each task that secedes leaves a new one behind.
MOST_THREADS = 1_024


class Occupation:
    """The use of one worker's time, over all its processes: seconds, as sums over its threads.

    Finished tasks have the times of their computation, and those of fetching data for them. A worker fetches while other tasks
    compute, so a thread has waited for data only in a gap before its next task. The fetching may be reported with a later task
    that needs the same data, so gaps are kept for a while.

    >>> worker = Occupation()
    >>> fetch, compute = ({"action": a, "start": b, "stop": e} for a, b, e in (("transfer", 0, 3), ("compute", 4, 6)))
    >>> worker.came(0.0, threads=1)
    >>> worker.finished("thread", [fetch, compute])
    >>> worker.finished("thread", [{**fetch, "start": 4, "stop": 7}, {**compute, "start": 8, "stop": 9}])
    >>> worker.computing, worker.transfer
    (3.0, 4.0)
    """

    def __init__(self) -> None:
        #: Computing finished tasks; and waiting, without a task, for data of other workers or from disk.
        self.computing = self.transfer = self.disk = 0.0
        #: With a task according to the scheduler, one thread for each task; and the time of the worker's presence.
        self.assigned = self.present = 0.0
        #: Computing the tasks that still run.
        self.running = 0.0
        self._threads = 0
        #: Tasks that it has according to the scheduler, and since when it has had that many.
        self._tasks, self._tasks_since = 0, 0.0
        #: When its process came; None: it is gone.
        self._came: float | None = None
        #: By thread: the end of its last task.
        self._ends: dict[Any, float] = {}
        #: Begin and end of the last times in which a thread had no task, until its next one.
        self._gaps: list[tuple[float, float]] = []

    def came(self, now: float, *, threads: int) -> None:
        """A process of the worker has come."""
        self._threads, self._came = threads, now
        self._tasks, self._tasks_since = 0, now
        self._ends.clear()
        self._gaps.clear()

    def gone(self, now: float) -> None:
        """The process is gone, and its tasks with it."""
        self.has_tasks(now, 0)
        self.computing += self.running
        self.running = 0.0
        self.present += self._presence(now)
        self._came = None

    def has_tasks(self, now: float, tasks: int) -> None:
        """Set the number of its tasks from now on."""
        self.assigned += min(self._tasks, self._threads) * max(0.0, now - self._tasks_since)
        self._tasks, self._tasks_since = tasks, now

    def finished(self, thread: Any, startstops: StartStops) -> None:
        """A task has ended."""
        computed = [each for each in startstops if each["action"] == "compute"]
        if computed:
            begin = min(each["start"] for each in computed)
            since = self._ends.get(thread, begin if self._came is None else self._came)
            if begin - since > LEAST_GAP:
                self._gaps = [*self._gaps[1 - MOST_GAPS :], (since, begin)]
            if len(self._ends) > MOST_THREADS:
                self._ends.clear()
            self._ends[thread] = max(each["stop"] for each in computed)
            self.computing += sum(max(0.0, each["stop"] - each["start"]) for each in computed)
        for each in startstops:
            if each["action"] == "transfer":
                self.transfer += self._cut_from_gaps(each["start"], each["stop"])
            elif each["action"] == "disk-read":
                self.disk += self._cut_from_gaps(each["start"], each["stop"])

    def _cut_from_gaps(self, start: float, stop: float) -> float:
        """Cut this time out of the gaps, from the last to the first, and return the seconds: each second counts once."""
        seconds = 0.0
        for place in reversed(range(len(self._gaps))):
            begin, end = self._gaps[place]
            if stop - start < LEAST_GAP or end <= start:
                break
            low, high = max(start, begin), min(stop, end)
            if high > low:
                seconds += high - low
                rest = ((begin, low), (high, end))
                self._gaps[place : place + 1] = [gap for gap in rest if gap[1] - gap[0] > LEAST_GAP]
                stop = low
        return seconds

    def _presence(self, now: float) -> float:
        """Seconds since its process came; 0: it is gone."""
        return 0.0 if self._came is None else now - self._came

    def sums(self, now: float) -> dict[str, float]:
        """The sums until now."""
        self.has_tasks(now, self._tasks)
        sums = {
            "present": self.present + self._presence(now),
            "assigned": self.assigned,
            "computing": self.computing + self.running,
            "transfer": self.transfer,
            "disk": self.disk,
        }
        return {name: round(seconds, 3) for name, seconds in sums.items()}
