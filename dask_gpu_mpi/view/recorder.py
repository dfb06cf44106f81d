"""The record of a job that the scheduler's process keeps for the report, in bounded memory, and sends as one message.

The workers send nothing in addition. Their heartbeats have Dask's metrics. Their messages of finished tasks have the begin and
end of each, and the senders of fetched data (`workers.plugins.TransferSizes` adds the bytes).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from dask.utils import key_split
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpu_mpi.base.timeline import DEATHS_TOPIC
from dask_gpu_mpi.view.heartbeat import ACTIONS, MOST_GPUS, Series, gpus_of, mapping, measured
from dask_gpu_mpi.view.job_watch import JobWatch

#: States of a task that waits or runs.
UNFINISHED = ("waiting", "queued", "processing", "no-worker")
#: Least seconds between samples; and workers that are sampled in a second, beyond which the samples are less frequent.
INTERVAL, SAMPLED_PER_SECOND = 1.0, 128
#: Arrivals and departures of workers, and prefixes of tasks, that are kept.
MOST_EVENTS, MOST_SHOWN = 2_000, 500
#: Prefixes whose results are counted.
MOST_PREFIXES = 5_000


class Recorder(SchedulerPlugin):
    """Records the workers and tasks of a scheduler; `from_start`: since before its first worker."""

    name = "dask_gpu_mpi-recorder"

    def __init__(
        self, scheduler: Any, *, from_start: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self._scheduler = scheduler
        self._from_start = from_start
        self._clock = clock
        self._since = clock()
        self._watch: JobWatch = scheduler.plugins[JobWatch.name]
        self._series = Series(INTERVAL)
        self._peaks: dict[str, dict[str, float]] = {}
        #: By worker's name, for each of its GPUs: the first and the last reading of its energy, in J.
        self._energy: dict[str, list[tuple[float, float] | None]] = {}
        self._stream = TaskStream()
        self._transfers = Transfers()
        self._failed = 0
        #: Bytes of results by the prefix of the task's name; Dask's sum leaves out tasks that it has forgotten.
        self._sizes: dict[str, int] = {}
        #: Name and node of each worker by address, including those that have gone.
        self._names: dict[str, tuple[str, str]] = {}
        #: By name.
        self._workers: dict[str, dict[str, Any]] = {}
        #: Time, event, worker, reason, output.
        self._events: deque[tuple[float, str, str, str, str]] = deque(maxlen=MOST_EVENTS)
        #: By name.
        self._occupations: defaultdict[str, Occupation] = defaultdict(Occupation)
        self._busy = Busy()
        self._busy.more(sum(task.state in UNFINISHED for task in scheduler.tasks.values()), self._since)
        for address in list(scheduler.workers):
            self.add_worker(scheduler, address)

    def begin(self) -> None:
        """Begin to sample, in the scheduler's event loop."""
        self._sampling = asyncio.get_running_loop().create_task(self._sample_forever())

    async def _sample_forever(self) -> None:
        while True:
            # after a failed sample, for example because of unexpected metrics, the next one follows
            with contextlib.suppress(Exception):
                self.sample()
            await asyncio.sleep(max(INTERVAL, len(self._scheduler.workers) / SAMPLED_PER_SECOND))

    def sample(self, *, last: bool = False) -> None:
        """Record the last metrics of each worker; `last`: even if it is not time yet."""
        now = self._clock()
        rows: dict[str, dict[str, float]] = {}
        for address, state in self._scheduler.workers.items():
            name = self._names[address][0]
            rows[name] = values = measured(state.metrics)
            peaks = self._peaks.setdefault(name, {})
            for quantity, value in values.items():
                # not of bits: the largest number means nothing
                if value > peaks.get(quantity, -1.0) and not quantity.startswith("gpu_slowed"):
                    peaks[quantity] = value
            readings = [gpu.get("energy") for gpu in gpus_of(state.metrics)[:MOST_GPUS]]
            pairs = zip_longest(self._energy.get(name, ()), readings)
            self._energy[name] = [old if new is None else (old[0] if old else new, new) for old, new in pairs]
            occupation = self._occupations[name]
            occupation.has_tasks(now, len(state.processing))
            heard = max(0.0, now - state.last_seen)
            running = [
                seconds + heard for task, seconds in state.executing.items() if task in state.processing
            ]
            occupation.running = sum(running)
        if last or self._series.due(now):
            self._series.add(now, rows)

    # -- called by the scheduler --------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker has come, for the first time or again."""
        state = scheduler.workers[worker]
        name = str(state.name)
        host = self._watch.hosts.get(name) or str(get_address_host(worker))
        self._names[worker] = (name, host)
        known = self._workers.get(name)
        self._workers[name] = {
            "name": name,
            "host": host,
            "threads": state.nthreads,
            "memory_limit": int(state.memory_limit or 0),
            "starts": 1 if known is None else known["starts"] + 1,
        }
        self._stream.restarted(name)
        self._occupations[name].came(self._clock(), threads=state.nthreads)
        what = "worker started" if known is None else "worker restarted"
        self._events.append((self._clock(), what, name, "", ""))

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str = "", **kwargs: Any) -> None:
        """A worker has gone; the stimulus has the reason."""
        name, _ = self._names.get(worker, (worker, ""))
        self._occupations[name].gone(self._clock())
        why = stimulus_id.rstrip("0123456789.-")  # without the time that distributed puts at its end
        self._events.append((self._clock(), "worker gone", name, why, ""))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task has changed its state: add it if it has run."""
        if (start in UNFINISHED) != (finish in UNFINISHED):
            self._busy.more(1 if finish in UNFINISHED else -1, self._clock())
        if finish == "processing" and (task := self._scheduler.tasks.get(key)) and task.processing_on:
            self._has_tasks(task.processing_on.address)
        if start != "processing" or finish not in ("memory", "erred"):
            return
        failed = finish == "erred"
        self._failed += failed
        startstops = kwargs.get("startstops")
        receiver = self._names.get(kwargs.get("worker", ""))
        if not startstops or receiver is None:  # its worker has died
            return
        prefix = key_split(key)
        if prefix in self._sizes or len(self._sizes) < MOST_PREFIXES:
            self._sizes[prefix] = self._sizes.get(prefix, 0) + (kwargs.get("nbytes") or 0)
        self._has_tasks(kwargs["worker"])
        self._occupations[receiver[0]].finished(kwargs.get("thread"), startstops)
        self._stream.add(receiver[0], kwargs.get("thread"), prefix, startstops, failed=failed)
        for each in startstops:
            if "source" in each and each["action"] == "transfer":
                sender = self._names.get(each["source"], (str(each["source"]), "unknown"))
                self._transfers.add(
                    sender, receiver, int(each.get("nbytes", 0)), max(0.0, each["stop"] - each["start"])
                )

    def _has_tasks(self, address: str) -> None:
        """Note the number of a worker's tasks; the next sample corrects it for tasks that another worker has stolen."""
        if (state := self._scheduler.workers.get(address)) is not None and address in self._names:
            self._occupations[self._names[address][0]].has_tasks(self._clock(), len(state.processing))

    # -- the answer ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """All of it, as plain data of bounded size."""
        with contextlib.suppress(Exception):
            self.sample(last=True)
        scheduler, now = self._scheduler, self._clock()
        return {
            "since": self._since,
            "until": now,
            "busy": self._busy.until(now),
            "from_start": self._from_start,
            "alive": [self._names[address][0] for address in scheduler.workers],
            "workers": [
                {
                    **worker,
                    "peaks": self._peaks.get(name, {}),
                    "energy": [
                        None if each is None else round(max(0.0, each[1] - each[0]), 1)
                        for each in self._energy.get(name, ())
                    ],
                    "seconds": self._occupations[name].sums(now),
                }
                for name, worker in self._workers.items()
            ],
            "series": self._series.packed(),
            "tasks": {**self._stream.packed(self._since), "failed": self._failed},
            "prefixes": _prefixes(scheduler.task_prefixes, self._sizes),
            "transfers": {"by": self._transfers.by, "rows": self._transfers.as_rows()},
            "events": sorted(
                [*self._events, *map(_death, scheduler.get_events(DEATHS_TOPIC))], key=lambda event: event[0]
            ),
            "warnings": list(self._watch.warnings),
            "transitions": int(scheduler.transition_counter),
        }


def _death(event: tuple[float, Any]) -> tuple[float, str, str, str, str]:
    """The event of a process that has died, as its agent has reported it; anyone may send others."""
    at, message = event
    worker, how, output = (str(mapping(message).get(key, "")) for key in ("worker", "how", "output"))
    return at, "process died", worker, how, output


def _prefixes(prefixes: Mapping[str, Any], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tasks by Dask's prefix of their names, those with the longest time first."""
    found = sorted(prefixes.values(), key=lambda prefix: prefix.duration, reverse=True)
    return [
        {
            "name": prefix.name,
            "tasks": int(prefix.state_counts["memory"] + prefix.state_counts["erred"]),
            "failed": int(prefix.state_counts["erred"]),
            "seconds": dict(prefix.all_durations),
            "bytes": int(sizes.get(prefix.name, 0)),
            "longest_running": float(prefix.max_exec_time) if prefix.max_exec_time > 0 else 0.0,
        }
        for prefix in found[:MOST_SHOWN]
    ]


def recorder_of(scheduler: Any, *, from_start: bool = False) -> Recorder:
    """The recorder of a scheduler, which records from now on unless it does already; `from_start`: there was no worker before."""
    known: Recorder | None = scheduler.plugins.get(Recorder.name)
    if known is not None:
        return known
    recorder = Recorder(scheduler, from_start=from_start)
    scheduler.add_plugin(recorder)
    recorder.begin()
    return recorder


# A sample of the tasks that have run, of bounded size: a random part of all, and the longest.
#
# Dask's `TaskStreamPlugin` keeps the last tasks, so only the end of a long job.

_PLACE = {action: place for place, action in enumerate(ACTIONS)}
#: Rectangles, and longest tasks, that are kept.
MOST, LONGEST = 20_000, 1_000
#: Rectangles of one task, names of tasks, and lanes of one worker that are kept.
MOST_OF_TASK, MOST_TASK_NAMES, MOST_LANES = 32, 2_000, 256

#: Begin, end, lane, name, action.
Rectangle = tuple[float, float, int, int, int]


class TaskStream:
    """The sample: tasks with `most` rectangles, chosen at random, and the `longest` tasks.

    A pattern in the order of tasks is not one of the sample: those with the largest random numbers are kept.
    """

    def __init__(self, *, most: int = MOST, longest: int = LONGEST) -> None:
        #: Tasks that have run.
        self.seen = 0
        self._most = most
        self._longest = longest
        self._rectangles = 0
        self._chance = random.Random(0)
        #: Random number of the task, its number, and its rectangles: a heap.
        self._kept: list[tuple[int, int, list[Rectangle]]] = []
        #: Length, random number (which chooses among tasks of the same length), number, rectangles: a heap.
        self._long: list[tuple[float, int, int, list[Rectangle]]] = []
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[str, int], int] = {}
        #: By worker: the lane of each of its threads.
        self._threads: dict[str, dict[Any, int]] = {}

    def add(
        self, worker: str, thread: Any, name: str, startstops: Sequence[Mapping[str, Any]], *, failed: bool
    ) -> None:
        """Add a task that has run, with the actions of its worker and their times."""
        self.seen += 1
        if not startstops:
            return
        begin = min(each["start"] for each in startstops)
        length = max(each["stop"] for each in startstops) - begin
        chance = self._chance.getrandbits(32)
        sampled = self._rectangles < self._most or chance > self._kept[0][0]
        is_long = len(self._long) < self._longest or (self._long and (length, chance) > self._long[0][:2])
        if not sampled and not is_long:
            return
        lane, place = self._lane(worker, thread), self._name(name)
        rectangles = [
            (each["start"], each["stop"], lane, place, _PLACE.get(action, _PLACE["other"]))
            for each in startstops[-MOST_OF_TASK:]
            for action in ["failed" if failed and each["action"] == "compute" else each["action"]]
        ]
        if sampled:
            heapq.heappush(self._kept, (chance, self.seen, rectangles))
            self._rectangles += len(rectangles)
            while self._rectangles > self._most:
                self._rectangles -= len(heapq.heappop(self._kept)[2])
        if is_long:
            add = heapq.heappush if len(self._long) < self._longest else heapq.heapreplace
            add(self._long, (length, chance, self.seen, rectangles))

    def restarted(self, worker: str) -> None:
        """A worker has a new process, whose threads replace the old ones."""
        self._threads.pop(worker, None)

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
        """For a message: packed columns, with times in seconds after `since`."""
        tasks = {number: rectangles for _, _, number, rectangles in self._long}
        tasks |= {number: rectangles for _, number, rectangles in self._kept}
        rectangles = sorted(rectangle for each in tasks.values() for rectangle in each)
        return {
            "seen": self.seen,
            "shown": len(tasks),
            "stride": max(1, self.seen // max(1, len(self._kept))),
            "longest": len(self._long),
            "names": list(self._names),
            "lanes": [list(lane) for lane in self._lanes],
            "start": array("d", [each[0] - since for each in rectangles]).tobytes(),
            "length": array("f", [max(0.0, each[1] - each[0]) for each in rectangles]).tobytes(),
            "lane": array("i", [each[2] for each in rectangles]).tobytes(),
            "name": array("i", [each[3] for each in rectangles]).tobytes(),
            "action": array("b", [each[4] for each in rectangles]).tobytes(),
        }


# The time in which there were unfinished tasks.


class Busy:
    """The time with unfinished tasks."""

    def __init__(self) -> None:
        #: Of unfinished tasks.
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


# Data between workers, added up by sender and receiver; if there are too many pairs of workers, by node.

#: Pairs that are kept.
MOST_PAIRS = 20_000


class Transfers:
    """The sums.

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
        #: By sender and receiver, each worker and node: number, bytes, seconds.
        self._pairs: dict[tuple[tuple[str, str], tuple[str, str]], list[float]] = {}

    def add(
        self,
        sender: tuple[str, str],
        receiver: tuple[str, str],
        size: float,
        seconds: float,
        number: float = 1,
    ) -> None:
        """Add transfers between two workers, each with its node."""
        if self.by == "node":
            sender, receiver = (sender[1], sender[1]), (receiver[1], receiver[1])
            if len(self._pairs) >= self._most and (sender, receiver) not in self._pairs:
                sender = receiver = ("other", "other")
        sums = self._pairs.setdefault((sender, receiver), [0, 0, 0.0])
        sums[0] += number
        sums[1] += size
        sums[2] += seconds
        if len(self._pairs) > self._most and self.by == "worker":
            self.by = "node"
            pairs, self._pairs = self._pairs, {}
            for pair, (number_, size_, seconds_) in pairs.items():
                self.add(*pair, size_, seconds_, number_)

    def as_rows(self) -> list[dict[str, Any]]:
        """The sums of each pair."""
        return [
            {"from": sender, "to": receiver, "count": count, "bytes": size, "seconds": round(seconds, 3)}
            for ((sender, _), (receiver, _)), (count, size, seconds) in self._pairs.items()
        ]


# The use of each worker's time, in seconds, as a sum over its threads.

#: Gaps between tasks of one worker that are kept, and the least of them in seconds.
MOST_GAPS, LEAST_GAP = 64, 1e-4
#: Threads of one worker whose last task is kept: each task that secedes leaves a new one behind.
MOST_THREADS = 1_024


class Occupation:
    """The sums of one worker, over all its processes.

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
        self._threads = self._tasks = 0
        self._since = 0.0
        self._came: float | None = None
        self._ends: dict[Any, float] = {}
        self._gaps: list[tuple[float, float]] = []

    def came(self, now: float, *, threads: int) -> None:
        """A process of the worker has come."""
        self._threads, self._tasks, self._since, self._came = threads, 0, now, now
        self._ends.clear()
        self._gaps.clear()

    def gone(self, now: float) -> None:
        """The process is gone, and its tasks with it."""
        self.has_tasks(now, 0)
        self.computing, self.running = self.computing + self.running, 0.0
        self.present += now - (now if self._came is None else self._came)
        self._came = None

    def has_tasks(self, now: float, tasks: int) -> None:
        """Set the number of its tasks from now on."""
        self.assigned += min(self._tasks, self._threads) * max(0.0, now - self._since)
        self._tasks, self._since = tasks, now

    def finished(self, thread: Any, startstops: Sequence[Mapping[str, Any]]) -> None:
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
                self.transfer += self._waited(each["start"], each["stop"])
            elif each["action"] == "disk-read":
                self.disk += self._waited(each["start"], each["stop"])

    def _waited(self, start: float, stop: float) -> float:
        """Seconds of this time that are in gaps, from the last to the first; each second counts once."""
        waited = 0.0
        for place in reversed(range(len(self._gaps))):
            begin, end = self._gaps[place]
            if stop - start < LEAST_GAP or end <= start:
                break
            low, high = max(start, begin), min(stop, end)
            if high > low:
                waited += high - low
                rest = ((begin, low), (high, end))
                self._gaps[place : place + 1] = [gap for gap in rest if gap[1] - gap[0] > LEAST_GAP]
                stop = low
        return waited

    def sums(self, now: float) -> dict[str, float]:
        """The sums until now."""
        self.has_tasks(now, self._tasks)
        sums = {
            "present": self.present + (0.0 if self._came is None else now - self._came),
            "assigned": self.assigned,
            "computing": self.computing + self.running,
            "transfer": self.transfer,
            "disk": self.disk,
        }
        return {name: round(seconds, 3) for name, seconds in sums.items()}
