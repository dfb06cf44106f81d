"""The workers of one rank: started together, followed until they end, closed together; their nannies, which restart them.

`agent.part` has a `Workers`. It makes each worker by `workers.factory`, reports each death of a worker's process, and gives up a
worker whose processes die too often (`watch_nanny`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import DEATHS_TOPIC, Timeline
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.nvidia import closing_time
from dask_gpu_mpi.network.credentials import clock_problem
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Start, WorkerPlan
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.factory import WatchedNanny, make_worker
from dask_gpu_mpi.workers.worker_options import PORTS

logger = logging.getLogger("dask_gpu_mpi")

#: Seconds between polls of the processes of a worker that is starting.
PIDS_INTERVAL = 0.02
#: Part of the grace in which Dask closes a worker by itself.
CLOSING_SHARE = 0.8
#: Characters of a dead process's last output that are sent to the scheduler.
MOST_OUTPUT = 4_000
#: A worker is removed after so many deaths of its processes within so many seconds, however long each process lived: one that
#: dies every 11 s gets nothing done. One that dies every half minute, or less often, may, and is always restarted.
DEATHS, WINDOW = 5, 120.0
#: Seconds between polls of a nanny's process.
NANNY_INTERVAL = 0.25
#: Errors by which Dask's classes refuse the value of an option, or fail because of it.
REFUSALS = (
    "TypeError", "ValueError", "KeyError", "AttributeError", "OverflowError", "ModuleNotFoundError", "FileNotFoundError",
)  # fmt: skip


class Workers:
    """All workers of a rank, with the agent's directory `scratch`.

    Calls ``on_end(name, why)`` when a worker has ended for good; None: it was retired, for example. `closing` is True after a
    call of `close`.
    """

    def __init__(
        self,
        options: Options,
        scratch: str,
        timeline: Timeline,
        on_end: Callable[[str | int, str | None], None],
    ) -> None:
        self._options = options
        self._scratch = scratch
        self._grace = closing_time(options, os.environ)
        self._timeline = timeline
        self._on_end = on_end
        self._workers: list[_Worker] = []
        self.closing = False

    async def start(self, start: Start) -> None:
        """Make them, and start them together; a DaskGpuMpiError if one can't be made, or does not start."""
        for plan in start.workers:
            # One after the other: the constructors read the environment.
            with self._timeline.step("make", f"worker {plan.name}"):
                try:
                    worker, nannies = make_worker(plan, start, self._options, self._scratch)
                except DaskGpuMpiError:
                    raise
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    raise self._error(f"worker {plan.name} could not be made", why) from error
                self._workers.append(_Worker(plan, worker, nannies, self._scratch))
        await asyncio.gather(*(self._start(worker) for worker in self._workers))

    async def _start(self, worker: _Worker) -> None:
        try:
            await worker.start(self._timeline)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            ports = [name for name in PORTS if name in self._options.worker_options]
            is_used = getattr(cause, "errno", None) == errno.EADDRINUSE
            if ports and (is_used or str(cause).startswith("Could not start ")):  # no port of a range is free
                raise _port_in_use(worker.plan, ports, self._options.worker_options) from error
            why = clock_problem(str(cause)) or f"{type(cause).__name__}: {cause}"
            output = worker.last_output()
            # The process ended before its nanny read the error.
            if "failed to start worker process" in why and output:
                why = output.splitlines()[-1]
            gpu = f" (GPU {worker.plan.device})" if worker.plan.device else ""
            raise self._error(f"worker {worker.plan.name}{gpu} did not start", why, output) from error

    def _error(self, found: str, why: str, output: str = "") -> DaskGpuMpiError:
        """The error of a worker that can't start: an InputError if its class refuses a value of the user's options."""
        options = self._options.worker_options
        if options and why.partition(":")[0] in REFUSALS:
            fix = f"correct or remove {' or '.join(options)} (--log-level info prints the traceback)"
            return InputError(f"worker_options: {found}: {' '.join(why.split()).rstrip('.')}", fix=fix)
        return StartupError(f"{found}: {why}" + (f"; its last output:\n{output}" if output else ""))

    @property
    def address(self) -> str:
        """The address of the first; empty: none is known."""
        return self._workers[0].address if self._workers else ""

    async def follow(self) -> bool:
        """Wait until all have ended for good, and return whether one has failed."""
        return any(await asyncio.gather(*(self._follow(worker) for worker in self._workers)))

    async def _follow(self, worker: _Worker) -> bool:
        why = await worker.failure()
        if not self.closing:
            self._on_end(worker.plan.name, why)
        return why is not None

    async def close(self) -> None:
        """Close them, and kill processes that are left after the grace."""
        logs.set_ending()
        self.closing = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.leave_files()
        closing = [asyncio.ensure_future(worker.close(self._grace * CLOSING_SHARE)) for worker in workers]
        if closing:
            await asyncio.wait(closing, timeout=self._grace)
        for pid in [pid for worker in workers for pid in worker.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _port_in_use(plan: WorkerPlan, names: list[str], options: Mapping[str, Any]) -> InputError:
    fixed = [name for name in names if ":" not in str(options[name])]
    ports = " or ".join(f"{name} {options[name]}" for name in fixed or names)
    return InputError(
        f"worker_options: worker {plan.name} did not start: {ports} is in use on {plan.host}",
        expected="a free port for each worker of a node",
        fix=f"a range with more ports, such as '9000:9099', or leave {' and '.join(names)} out for any free port",
        what="ports",
    )


class _Worker:
    """One worker: Dask's object, with its nannies."""

    def __init__(self, plan: WorkerPlan, worker: Any, nannies: list[WatchedNanny], scratch: str) -> None:
        self.plan = plan
        self._worker = worker
        self._nannies = nannies
        self._scratch = scratch
        #: Its processes while it started.
        self._pids: set[int] = set()

    async def start(self, timeline: Timeline) -> None:
        """Wait until it has registered."""
        watch = asyncio.ensure_future(self._collect_pids())
        try:
            with timeline.step("start", f"worker {self.plan.name}"):
                await self._worker
        finally:
            watch.cancel()

    def last_output(self) -> str:
        """The last output of its processes, while it started."""
        return next(filter(None, (logs.last_output(self._scratch, pid) for pid in sorted(self._pids))), "")

    @property
    def address(self) -> str:
        """See `Workers.address`; that of a user's class is not known."""
        served = self._nannies[0] if self._nannies else self._worker
        found = (getattr(served, name, None) for name in ("worker_address", "address"))
        return next((each for each in found if isinstance(each, str)), "")

    async def failure(self) -> str | None:
        """Wait until it has ended for good, and return why if it failed; report each death to the scheduler."""
        watches = [
            asyncio.ensure_future(watch_nanny(nanny, on_death=partial(self._report_death, nanny)))
            for nanny in self._nannies
        ]
        finished = asyncio.ensure_future(self._worker.finished())
        await asyncio.wait({finished, *watches}, return_when=asyncio.FIRST_COMPLETED)
        why = next((watch.result() for watch in watches if watch.done()), None)
        for task in (finished, *watches):
            task.cancel()
        if why is None and any((nanny.closed_for or "").startswith("nanny-inst") for nanny in self._nannies):
            return "its nanny could not start it again"
        return why

    def _report_death(self, nanny: Any, pid: int, code: int | None) -> None:
        how = "died" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        output = logs.last_output(self._scratch, pid)[-MOST_OUTPUT:]
        # Dask's own line has neither the worker's name nor its host
        say(
            f"warning: the process of worker {self.plan.name} ended on {socket.gethostname()} ({how}), and its tasks run again. "
            "Fix: after signal 9 most often smaller chunks or more memory, otherwise its last lines show the cause"
        )
        # the connection or the scheduler may be gone as well
        with contextlib.suppress(Exception):
            nanny.log_event(DEATHS_TOPIC, {"worker": str(self.plan.name), "how": how, "output": output})

    async def close(self, timeout: float) -> None:
        """Close it by Dask's method."""
        try:
            await self._worker.close(timeout=timeout)
        except Exception:
            logger.debug("a worker did not close", exc_info=True)

    def leave_files(self) -> None:
        """Let nannies keep its directory: the agent removes it with the scratch, and this loop would wait for its removal."""
        for nanny in self._nannies:
            if nanny.process is not None:
                nanny.process.worker_dir = None

    def pids(self) -> list[int]:
        """The process ids of its nannies' processes."""
        return [nanny.pid for nanny in self._nannies if nanny.pid]

    async def _collect_pids(self) -> None:
        """Collect the ids of its processes while it starts: their last output is in files with these ids."""
        while True:
            self._pids.update(self.pids())
            await asyncio.sleep(PIDS_INTERVAL)


async def watch_nanny(
    nanny: Any,
    clock: Callable[[], float] = time.monotonic,
    *,
    on_death: Callable[[int, int | None], None] = lambda pid, code: None,
) -> str:
    """Wait until a nanny's worker has died too often, close the nanny, and return why the worker is removed.

    Calls ``on_death(pid, exit_code)`` for each process that has died; the code is None if it is not known.
    """
    pid, process = nanny.pid, _process(nanny)
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        await asyncio.sleep(NANNY_INTERVAL)
        current = nanny.pid
        if current == pid:
            continue
        code = getattr(process, "exitcode", None)
        # It ends together with its worker, which was retired, or with the cluster.
        is_closing = nanny.status.name in ("closing_gracefully", "closing", "closed")
        in_order = pid in nanny.requested_ends or is_closing or (code == 0 and nanny.has_lifetime)
        if pid is not None and not in_order:
            deaths.append(clock())
            on_death(pid, code)
        pid, process = current, _process(nanny)
        if len(deaths) == DEATHS and (seconds := deaths[-1] - deaths[0]) <= WINDOW:
            await nanny.close(reason="nanny-instantiate-too-often")
            return f"its process died {DEATHS} times within {seconds:.0f} s"


def _process(nanny: Any) -> Any:
    """Dask's object of a nanny's process, which has the exit code even when the nanny no longer has the process."""
    return nanny.process and nanny.process.process
