"""In the scheduler's process: the warnings of a run, and the answer with the facts of the job (`FACTS_OPERATION`).

`agent.scheduler` attaches the `JobWatch`. `top` (`view.snapshot`) and the report (`view.recorder`) show its warnings: workers
that were lost or paused, tasks that no worker can run, and the scheduler's own log lines. It also tells whether there has been a
client, and refuses an engine that would wait forever for CPU workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from dask.utils import natural_sort_key
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpu_mpi.base.plain_data import pack
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import listed, one_line
from dask_gpu_mpi.base.timeline import JOB_PLUGIN
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.sites.batch import end_time
from dask_gpu_mpi.view.heartbeat import mapping

#: The scheduler's handler.
FACTS_OPERATION = "gpu_mpi_job"
#: Warnings that are kept, and characters of each: a log line may be a traceback.
KEPT, LONGEST = 20, 400
LOGGERS = ("distributed", "dask_gpu_mpi")
#: Part of the pickled function that Polars' engine runs on the workers.
POLARS = b"cudf_polars.engine.dask"
#: Seconds that tasks wait before the user is warned that no worker can run them; they are inspected twice in that time.
UNRUNNABLE_AFTER = 10.0
#: Seconds in which a lost worker may come back: tasks may wait for it.
RESTART_TIME = 60.0
#: Waiting tasks that are inspected each time.
LOOKED_AT = 10_000
#: What the user is told if tasks wait, and all workers have ended in order: those do not come back.
_NO_WORKER = (
    "scheduler: no worker is left, and tasks wait: all were retired, or have reached their lifetime. Fix: keep a worker, or "
    "set distributed.worker.lifetime.restart"
)
#: What the user is told if tasks wait, and no worker leaves the state in which Dask starts no task.
_ALL_PAUSED = (
    "scheduler: all workers are paused, since too much host memory is in use, and tasks wait. Fix: smaller chunks, a larger "
    "memory_limit (--memory-limit), more nodes, or a local_directory (--local-directory) with more space, if that is full"
)
#: distributed's names of the removal of a worker on request, of a client or the worker itself.
INTENDED = ("retire-workers-", "worker-close-gracefully-")


class JobWatch(SchedulerPlugin):
    """Watches one scheduler; `plan`: that of the job, None if it is not known."""

    name = JOB_PLUGIN

    def __init__(self, plan: Plan | None) -> None:
        workers = plan.workers if plan is not None else ()
        self._scheduler: Any = None
        #: As bytes, which each answer has.
        self._plan = pack(plan)
        #: The end of the job, once somebody has requested it.
        self._end: asyncio.Future[float | None] | None = None
        self._had_client = False
        self._on_client: Callable[[], None] | None = None
        #: The last warnings of the run, the oldest first: time in seconds since the epoch, and one line.
        self.warnings: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self._log = _LogLines(self)
        #: Node and kind of each worker of the plan, by name, and those of them that have not come yet.
        self.hosts = {str(worker.name): worker.host for worker in workers}
        self._kinds: dict[str, str] = {str(worker.name): worker.kind for worker in workers}
        self._expected = set(self.hosts)
        #: Names of the connected workers, by address, and the addresses of those that have reported that they close.
        self._names: dict[str, str] = {}
        self._leaving: set[str] = set()
        #: Names of workers that have been lost, and when (``time.monotonic()``); of those that were removed on request.
        self._lost: dict[str, float] = {}
        self._retired: set[str] = set()
        #: Why no worker may start a task although there are some, and since when (``time.monotonic()``).
        self._stuck: tuple[str, float] | None = None
        #: Requirements that no worker meets, and other reasons, of which the user has been warned.
        self._warned_of: set[object] = set()
        self._inspection = PeriodicCallback(self.inspect_tasks, 1e3 * UNRUNNABLE_AFTER / 2)

    def attach(self, scheduler: Any) -> None:
        """Register this with the scheduler, with an answer to `FACTS_OPERATION`; before its first worker comes."""
        self._scheduler = scheduler
        scheduler.add_plugin(self)
        broadcast = scheduler.handlers["broadcast"]

        async def checked_broadcast(*, msg: dict[str, Any], **more: Any) -> Any:
            self.refuse_cpu_workers(msg.get("function"))
            return await broadcast(msg=msg, **more)

        scheduler.handlers.update({FACTS_OPERATION: self.answer, "broadcast": checked_broadcast})
        self._inspection.start()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._log)

    async def close(self) -> None:
        """Called by distributed when the scheduler closes."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._log)
        self._inspection.stop()

    async def answer(self) -> dict[str, Any]:
        """The facts and later events, as plain data.

        ``"plan"``: the `Plan` or None, as bytes, ``"events"``: the last warnings, ``"retired"``:
        names of workers that were closed on request, ``"end"``: when the batch system ends the job, or None, and ``"now"``. Times
        are in seconds since the epoch by the scheduler's clock.
        """
        if self._end is None:
            # Some batch systems need a command for this, which runs once, at the first request.
            self._end = asyncio.get_running_loop().run_in_executor(None, end_time, dict(os.environ))
        return {
            "plan": self._plan,
            "events": list(self.warnings),
            "retired": sorted(self._retired),
            "end": await asyncio.shield(self._end),
            "now": time.time(),
        }

    def warn(self, text: str) -> None:
        """Note a warning."""
        self.warnings.append((time.time(), one_line(text, LONGEST)))

    def refuse_cpu_workers(self, function: Any) -> None:
        """Refuse an engine that makes every worker a member on its GPU, if some have none: the others would wait forever.

        The RuntimeError is raised in the client that calls ``client.run(function)``.
        """
        without = [name for name in self._names.values() if self._kinds.get(name) == "cpu"]
        if isinstance(function, bytes) and POLARS in function and without and "gpu" in self._kinds.values():
            raise RuntimeError(
                f"cudf_polars' DaskEngine uses every worker as a rank, and {len(without)} of the {len(self._names)} workers have "
                f"no GPU (worker {without[0]}). Fix: start the job without --cpu-workers"
            )

    def report_client(self, report: Callable[[], None]) -> None:
        """Call `report` once the scheduler has had a client, now or later."""
        self._on_client = report
        if self._had_client:
            report()

    def add_client(self, scheduler: Any, client: str) -> None:
        """Called by distributed when a client has connected, of any process."""
        if not self._had_client and self._on_client is not None:
            self._on_client()
        self._had_client = True

    # -- workers that come, go, or pause ------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Called by distributed when a worker has come."""
        name = str(scheduler.workers[worker].name)
        self._expected.discard(name)
        self._retired.discard(name)
        self._names[worker] = name
        if self._lost.pop(name, None) is not None:
            self.warn(f"{self._called(worker)} restarted")

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str = "", **kwargs: Any) -> None:
        """Called by distributed when a worker is gone; the stimulus has the reason."""
        called = self._called(worker)  # by its name, which goes now
        name = self._names.pop(worker, "")
        if worker in self._leaving or stimulus_id.startswith(INTENDED):
            self._leaving.discard(worker)
            self._retired.add(name)
            return
        self._lost[name] = time.monotonic()
        self.warn(f"{called} lost: its connection ended without a message")

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by distributed for each event: among them each new status of a worker, below its address."""
        if topic not in self._names or mapping(msg).get("action") != "worker-status-change":
            return
        status = str(msg.get("status"))
        if status.startswith("closing"):
            self._leaving.add(topic)
        elif status == "paused":
            self.warn(f"{self._called(topic)} paused: too much host memory in use")
        elif status == "running" and msg.get("prev-status") == "paused":
            self.warn(f"{self._called(topic)} continues")

    def _called(self, address: str) -> str:
        """A connected worker in messages."""
        name = self._names.get(address, "")
        return f"worker {name} on {self.hosts.get(name, get_address_host(address))}"

    def give_up(self, names: Sequence[str], text: str) -> None:
        """These workers are lost for good, with their rank: nothing waits for them any longer."""
        self.warn(text)
        for name in names:
            self._lost.pop(name, None)
            self._expected.discard(name)

    def recently_lost(self, seconds: float) -> list[tuple[str, str]]:
        """Name and kind of each worker that was lost within so many seconds and is not back."""
        since = time.monotonic() - seconds
        return [(name, self._kinds.get(name, "")) for name, at in self._lost.items() if at >= since]

    # -- tasks that wait for a worker that never comes -------------------------------------------------------------

    def inspect_tasks(self) -> None:
        """Warn of tasks that have waited for long, and that no worker could run: plain Dask lets them wait forever."""
        now = time.monotonic()
        waiting: dict[Any, float] = self._scheduler.unrunnable
        workers = list(self._scheduler.workers.values())
        self._warn_of_stuck(now, workers)
        if not workers or self._expected or self.recently_lost(RESTART_TIME):
            return  # one that can run them may still come
        for task, since in islice(waiting.items(), LOOKED_AT):
            if now < since + UNRUNNABLE_AFTER:
                return  # those that follow have waited for less
            needs = (
                bool(task.worker_restrictions or task.host_restrictions),
                *(task.resource_restrictions or {}).items(),
            )
            if needs not in self._warned_of and (text := self._unrunnable(task, workers)):
                self._warn_once(needs, text)

    def _warn_of_stuck(self, now: float, workers: Sequence[Any]) -> None:
        """Warn if there are tasks, and for long no worker that may start one."""
        if workers:
            stuck, text = all(each.status.name == "paused" for each in workers), _ALL_PAUSED
        else:
            stuck, text = not (self._expected or self._lost), _NO_WORKER
        has_tasks = self._scheduler.unrunnable or self._scheduler.queued or any(w.processing for w in workers)
        if not (stuck and has_tasks):
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != text:
            self._stuck = (text, now)
        elif now >= self._stuck[1] + UNRUNNABLE_AFTER:
            self._warn_once(text, text)

    def _warn_once(self, reason: object, text: str) -> None:
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            self.warn(text)
            say(f"warning: {text}")

    def _unrunnable(self, task: Any, workers: Sequence[Any]) -> str:
        """Why none of these workers can run it; empty: one can, and is paused (`Scheduler.valid_workers` does not list those)."""
        what = f"scheduler: no worker can run the task {task.prefix.name!r}, which has waited for {UNRUNNABLE_AFTER:g} s"
        addresses, hosts = task.worker_restrictions or (), task.host_restrictions or ()
        allowed = workers
        if (addresses or hosts) and not task.loose_restrictions:
            names = [self._scheduler.coerce_hostname(host) for host in hosts]
            allowed = [
                each
                for each in workers
                if each.address in addresses or get_address_host(each.address) in names
            ]
        if not allowed:
            there = sorted((str(each.name) for each in workers), key=natural_sort_key)
            return (
                f"{what}: it requires workers={listed([*addresses, *hosts])} (expected one of {listed(there)}). Fix: choose "
                "a worker or node of this cluster"
            )
        lack = _lack_of_resources(task.resource_restrictions or {}, [each.resources for each in allowed])
        return lack and f"{what}: {lack}"


def _lack_of_resources(requires: Mapping[str, float], workers: Sequence[Mapping[str, float]]) -> str:
    """Which resources a task requires of one worker, and what these workers have; empty: one of them has enough."""
    if any(all(has.get(name, 0) >= requires[name] for name in requires) for has in workers):
        return ""
    most: dict[str, float] = {}
    for has in workers:
        for name, number in has.items():
            most[name] = max(number, most.get(name, 0))
    fix = "require what one worker has, or set resources in worker_options (--worker-options)"
    if "CPU" in requires and "CPU" not in most:
        fix = "start CPU workers (--cpu-workers 1)"
    elif "GPU" in requires and "GPU" not in most:
        fix = "start the job on nodes with GPUs, or do not require one"
    return f"it requires resources {_amounts(requires)} (expected at most {_amounts(most)} of a worker). Fix: {fix}"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={number:g}" for name, number in sorted(resources.items())) or "none"


class _LogLines(logging.Handler):
    """The scheduler's own log lines from WARNING on."""

    def __init__(self, watch: JobWatch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._watch.warn(record.getMessage())
        except Exception:  # a malformed call of a library: logging reports it, and the scheduler continues
            self.handleError(record)
