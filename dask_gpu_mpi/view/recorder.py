"""What the scheduler's process records of a job, for its report, in bounded memory; and its answer, in one message.

Nothing is asked of the workers: their heartbeats carry Dask's metrics, and their messages of finished tasks when each began and
ended, and from whom they have fetched data (`workers.plugins.TransferSizes` adds how much).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dask.utils import key_split
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpu_mpi.base.timeline import DEATHS_TOPIC
from dask_gpu_mpi.view.heartbeat import measured
from dask_gpu_mpi.view.job_watch import JobWatch
from dask_gpu_mpi.view.samples import Series, TaskStream, Transfers

__all__ = ["Recorder", "recorder_of"]

#: Least seconds between samples; and workers that are sampled in a second, beyond which the samples are less frequent.
INTERVAL, SAMPLED_PER_SECOND = 1.0, 128
#: Arrivals and departures of workers, and prefixes of tasks, that are kept.
MOST_EVENTS, MOST_SHOWN = 2_000, 500
#: Prefixes whose results are counted.
MOST_PREFIXES = 5_000


class Recorder(SchedulerPlugin):
    """Records; a plugin of the scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Whose workers and tasks.
    from_start : bool
        Whether it has been there before the first worker.
    clock : callable
        Seconds since the epoch.
    """

    name = "dask_gpu_mpi-recorder"
    idempotent = True

    def __init__(
        self, scheduler: Any, *, from_start: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self._scheduler = scheduler
        self._from_start = from_start
        self._clock = clock
        self._since = clock()
        self._series = Series(INTERVAL)
        self._peaks: dict[str, dict[str, float]] = {}
        self._stream = TaskStream()
        self._transfers = Transfers()
        self._failed = 0
        #: Bytes of results by the prefix of the task's name; Dask's own sum is of the tasks that it has not forgotten.
        self._sizes: dict[str, int] = {}
        #: By address, also of those that have gone: name and node.
        self._names: dict[str, tuple[str, str]] = {}
        #: By name.
        self._workers: dict[str, dict[str, Any]] = {}
        self._events: deque[tuple[float, str, str, str]] = deque(maxlen=MOST_EVENTS)
        for address in list(scheduler.workers):
            self.add_worker(scheduler, address)

    def begin(self) -> None:
        """Begin to sample, in the scheduler's event loop."""
        self._sampling = asyncio.get_running_loop().create_task(self._sample_for_ever())

    def end(self) -> None:
        """End to sample."""
        self._sampling.cancel()

    async def _sample_for_ever(self) -> None:
        while True:
            self._try_sample()
            await asyncio.sleep(max(INTERVAL, len(self._scheduler.workers) / SAMPLED_PER_SECOND))

    def _try_sample(self, *, last: bool = False) -> None:
        # one sample that fails, of a worker that reports what nobody expects, is not the last one
        with contextlib.suppress(Exception):
            self.sample(last=last)

    def sample(self, *, last: bool = False) -> None:
        """Take what each worker has reported last; `last`: also where it is not time yet."""
        now = self._clock()
        rows: dict[str, dict[str, float]] = {}
        for address, state in self._scheduler.workers.items():
            name = self._names[address][0]
            rows[name] = values = measured(state.metrics)
            peaks = self._peaks.setdefault(name, {})
            for quantity, value in values.items():
                if value > peaks.get(quantity, -1.0):
                    peaks[quantity] = value
        if last or self._series.due(now):
            self._series.add(now, rows)

    # -- called by the scheduler --------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker is there, for the first time or again."""
        state = scheduler.workers[worker]
        name, host = str(state.name), str(get_address_host(worker))
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
        self._events.append(
            (self._clock(), "worker started" if known is None else "worker restarted", name, "")
        )

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str = "", **kwargs: Any) -> None:
        """A worker has gone; the stimulus says why."""
        name, _ = self._names.get(worker, (worker, ""))
        self._events.append((self._clock(), "worker gone", name, _reason(stimulus_id)))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task has changed its state: those that have run are noted."""
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
        self._stream.add(receiver[0], kwargs.get("thread"), prefix, startstops, failed=failed)
        for each in startstops:
            if "source" in each and each["action"] == "transfer":
                sender = self._names.get(each["source"], (str(each["source"]), "unknown"))
                self._transfers.add(
                    sender, receiver, int(each.get("nbytes", 0)), max(0.0, each["stop"] - each["start"])
                )

    # -- the answer ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """All of it, as plain data of bounded size."""
        self._try_sample(last=True)
        scheduler = self._scheduler
        return {
            "since": self._since,
            "until": self._clock(),
            "from_start": self._from_start,
            "alive": [self._names[address][0] for address in scheduler.workers],
            "workers": list(self._workers.values()),
            "series": self._series.packed(),
            "peaks": self._peaks,
            "tasks": {**self._stream.packed(self._since), "failed": self._failed},
            "prefixes": _prefixes(scheduler.task_prefixes, self._sizes),
            "transfers": {"by": self._transfers.by, "rows": self._transfers.as_rows()},
            "events": [list(event) for event in self._events],
            "deaths": [[at, *_death(message)] for at, message in scheduler.get_events(DEATHS_TOPIC)],
            "warnings": _warnings(scheduler.plugins.get(JobWatch.name)),
            "transitions": int(scheduler.transition_counter),
        }


def _reason(stimulus: str) -> str:
    """A stimulus without the time that distributed puts at its end.

    >>> _reason("handle-worker-cleanup-1763979000.12")
    'handle-worker-cleanup'
    """
    return stimulus.rstrip("0123456789.-")


def _death(message: Any) -> tuple[str, str, str]:
    get = message.get if isinstance(message, dict) else {}.get
    return str(get("worker", "")), str(get("how", "")), str(get("output", ""))


def _warnings(watch: JobWatch | None) -> list[tuple[float, str]]:
    """Of the run, the last ones; None: the scheduler is not one of ours."""
    return [] if watch is None else [(warning.time, warning.text) for warning in watch.warnings]


def _prefixes(prefixes: Mapping[str, Any], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tasks by Dask's prefix of their names, those that took longest first."""
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
    """The recorder of a scheduler, which records from now on unless it does already.

    `from_start`: there has been no worker before.
    """
    known = scheduler.plugins.get(Recorder.name)
    if isinstance(known, Recorder):
        return known
    recorder = Recorder(scheduler, from_start=from_start)
    scheduler.add_plugin(recorder)
    recorder.begin()
    return recorder
