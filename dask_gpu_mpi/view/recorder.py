"""The record of a job that the scheduler's process keeps for the report, in bounded memory, and sends as one message.

The workers send nothing in addition. Their heartbeats have Dask's metrics (`view.heartbeat`). Their messages of finished tasks
have the begin and end of each, and the senders of fetched data (`view.task_record`); `workers.plugins.TransferSizes` adds the
bytes. `agent.scheduler` makes the `Recorder`, and `job.report` requests its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from dask.utils import key_split
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpu_mpi.base.timeline import DEATHS_TOPIC
from dask_gpu_mpi.view.heartbeat import Measurements, mapping
from dask_gpu_mpi.view.job_watch import JobWatch
from dask_gpu_mpi.view.task_record import Busy, Occupation, StartStops, TaskStream, Transfers

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
        #: Name and node of each worker by address, including those that have gone.
        self._names: dict[str, tuple[str, str]] = {}
        #: The rows of the record's "workers", by name.
        self._workers: dict[str, dict[str, Any]] = {}
        #: Time, event, worker, reason, output.
        self._events: deque[tuple[float, str, str, str, str]] = deque(maxlen=MOST_EVENTS)
        self._measurements = Measurements(INTERVAL)
        self._stream = TaskStream()
        self._transfers = Transfers()
        #: By name.
        self._occupations: defaultdict[str, Occupation] = defaultdict(Occupation)
        self._failed = 0
        #: Bytes of results by the prefix of the task's name; Dask's sum leaves out tasks that it has forgotten.
        self._sizes: dict[str, int] = {}
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
        """Record the last heartbeat of each worker; `last`: as a point in time, even if it is not time for one yet."""
        now = self._clock()
        metrics: dict[str, Any] = {}
        for address, state in self._scheduler.workers.items():
            name = self._names[address][0]
            metrics[name] = state.metrics
            occupation = self._occupations[name]
            occupation.has_tasks(now, len(state.processing))
            # the heartbeat has the seconds of each task that ran, but those since then
            since_heartbeat = max(0.0, now - state.last_seen)
            running = [seconds for task, seconds in state.executing.items() if task in state.processing]
            occupation.running = sum(running) + since_heartbeat * len(running)
        self._measurements.add(now, metrics, last=last)

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
            self._note_tasks_of(task.processing_on.address)
        if start != "processing" or finish not in ("memory", "erred"):
            return
        failed = finish == "erred"
        self._failed += failed
        address, startstops = kwargs.get("worker", ""), kwargs.get("startstops")
        if not startstops or address not in self._names:  # its worker has died
            return
        self._note_tasks_of(address)
        prefix = key_split(key)
        if prefix in self._sizes or len(self._sizes) < MOST_PREFIXES:
            self._sizes[prefix] = self._sizes.get(prefix, 0) + (kwargs.get("nbytes") or 0)
        name, thread = self._names[address][0], kwargs.get("thread")
        self._occupations[name].finished(thread, startstops)
        self._stream.add(name, thread, prefix, startstops, failed=failed)
        self._add_transfers(self._names[address], startstops)

    def _note_tasks_of(self, address: str) -> None:
        """Note the number of a worker's tasks; the next sample corrects it for tasks that another worker has stolen."""
        if (state := self._scheduler.workers.get(address)) is not None and address in self._names:
            self._occupations[self._names[address][0]].has_tasks(self._clock(), len(state.processing))

    def _add_transfers(self, receiver: tuple[str, str], startstops: StartStops) -> None:
        for each in startstops:
            if each["action"] == "transfer" and "source" in each:
                sender = self._names.get(each["source"], (str(each["source"]), "unknown"))
                seconds = max(0.0, each["stop"] - each["start"])
                self._transfers.add(sender, receiver, int(each.get("nbytes", 0)), seconds)

    # -- the answer ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """All of it, as plain data of bounded size."""
        with contextlib.suppress(Exception):
            self.sample(last=True)
        scheduler, now = self._scheduler, self._clock()
        deaths = map(_death, scheduler.get_events(DEATHS_TOPIC))
        return {
            "since": self._since,
            "until": now,
            "busy": self._busy.until(now),
            "from_start": self._from_start,
            "alive": [self._names[address][0] for address in scheduler.workers],
            "workers": [
                {
                    **worker,
                    "peaks": self._measurements.peaks.get(name, {}),
                    "energy": self._measurements.energy(name),
                    "seconds": self._occupations[name].sums(now),
                }
                for name, worker in self._workers.items()
            ],
            "series": self._measurements.packed(),
            "tasks": {**self._stream.packed(self._since), "failed": self._failed},
            "prefixes": _prefixes(scheduler.task_prefixes, self._sizes),
            "transfers": {"by": self._transfers.by, "rows": self._transfers.as_rows()},
            "events": sorted([*self._events, *deaths], key=lambda event: event[0]),
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
