"""The process beside a rank, in which Dask lives: it owns the rank's workers and, on the head rank, the scheduler's process.

Started by `supervisor.AgentProcess`, by way of `agentstart`, without MPI and without the launcher's variables. Its `__main__` is
empty, so the user's script is never run again in a worker. It takes frames from standard input, the lifeline: at its end of file
the rank is gone or wants no more, and everything here ends within the grace. Answers go through a pipe of their own; standard
output and error are the rank's, so that what tasks print ends where the user looks for it.

The order matters: import while there is one thread; then configure; then fork the fork server; only then start the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing import active_children, get_context
from typing import Any

from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.pdeathsig import die_with_parent
from dask_gpu_mpi.base.timeline import Step, Timeline
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.gpu_probe import collect
from dask_gpu_mpi.machine.scratch import make_scratch, remove_scratch
from dask_gpu_mpi.mpi.start_watchdog import StartWatch
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.network.ucx import (
    connection_config,
    hide_gpus,
    import_ucx,
    start_ucx_aside,
    stop_watching_ucx,
    transfer_config,
)
from dask_gpu_mpi.options.dask_config import import_config
from dask_gpu_mpi.plan.planner import WorkerPlan

from . import logs
from .forkserver import become_fork_server, become_resource_tracker, watch_fork_server
from .orders import Configuration, SchedulerSettings, WorkerSettings
from .scheduler import run_scheduler
from .worker_factory import kill_at_once, listen_on_tcp, make_worker, measure_less
from .worker_watch import closing_reason, watch_nanny

__all__ = ["run"]

logger = logging.getLogger("dask_gpu_mpi")

#: What workers need; `distributed` alone leaves these to the first use, once in every worker.
PRELOAD = ("distributed", "distributed.nanny", "distributed.worker", "distributed.scheduler")
#: What they and the scheduler import by and by, after that: a dozen files for each of them. Some are gone in other versions.
PRELOAD_LATER = (
    "numpy.random",
    "multiprocessing.popen_forkserver",
    "multiprocessing.synchronize",
    "tornado.platform.asyncio",
    "dask_gpu_mpi.agent.worker_plugins",
    *(
        f"distributed.http.{name}"
        for name in ("worker", "worker.prometheus", "prometheus", "health", "statics")
    ),
    *(f"distributed.http.scheduler{name}" for name in ("", ".prometheus", ".info", ".json")),
)


#: Seconds that UCX may take for its hooks: it takes one.
HOOKS = 60.0


def run(
    lifeline: int,
    reply: int,
    timeline: Timeline,
    *,
    cuda: bool,
    hooks: threading.Thread | None,
    look: int | None,
) -> None:
    """Import, be configured, fork, and obey until the lifeline ends.

    Parameters
    ----------
    lifeline, reply : int
        File descriptors of orders and answers.
    timeline : Timeline
        Of this process.
    cuda : bool
        Whether to import dask_cuda.
    hooks : threading.Thread or None
        What puts UCX's hooks into CUDA's library.
    look : int or None
        The child that looks at the GPUs.
    """
    import_config()
    for name in (*PRELOAD, *(("dask_cuda",) if cuda else ())):
        importlib.import_module(name)
    for name in PRELOAD_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Every worker tells the scheduler; what it has found out it keeps: eight files, and `uname`.
    sys.modules["distributed.versions"].get_versions()
    timeline.lap("import")
    if hooks is not None:
        hooks.join(HOOKS)
        if hooks.is_alive():  # nothing that is forked may have half of them
            raise DaskGpuMpiError(f"UCX has not put its hooks into CUDA's library within {HOOKS:g} s")
        timeline.lap("wait for UCX's hooks")
    reader = FrameReader(lifeline)
    frames: list[Any] = []
    while not frames:
        frames = reader.read(timeout=3600.0)
        if reader.eof:
            return
    configuration, *rest = frames
    scratch: str | None = None
    try:
        try:
            scratch = _configure(configuration)
            become_resource_tracker([lifeline, reply], scratch)
            make_scratch(scratch)
            timeline.lap("configure")
            known = become_fork_server(scratch, [lifeline, reply], (*PRELOAD, *PRELOAD_LATER))
            gc.enable()
            timeline.lap("fork")
        except DaskGpuMpiError as error:
            write_frame(reply, ("failed", str(error), error.exit_code))
            return
        if look is not None:  # threads are allowed now; inside the driver it may hang
            threading.Thread(target=collect, args=(look,), name="look", daemon=True).start()
        if not _in_process(configuration.worker_class):
            _leave_gpus_alone()
            # From here on the lifeline tells, and leaves time to clean up; a task inside the agent could keep it unread.
            die_with_parent(0)
        write_frame(reply, ("prepared", scratch))
        agent = Agent(configuration, scratch, lifeline, reply, reader, timeline, watched=known)
        asyncio.run(agent.run(rest))
    finally:
        _end_children()
        if scratch is not None:
            # workers that were killed a moment ago may still be writing there
            remove_scratch(scratch, within=configuration.shutdown_timeout)


def _configure(configuration: Configuration) -> str:
    """Everything that must be settled before the fork; returns the scratch directory, which is still to be made."""
    import dask

    from .worker_options import check_options_of

    dask.config.update(dask.config.config, configuration.dask_config, priority="new")
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    check_options_of(configuration.worker_class, configuration.worker_options, where="worker_options")
    if configuration.protocol == "ucx" and importlib.util.find_spec("distributed_ucxx") is None:
        raise InputError(
            "protocol 'ucx' needs the package distributed-ucxx, which is not installed here: install dask-gpu-mpi[cuda12] or "
            "dask-gpu-mpi[cuda13], as your driver has it, or leave protocol (--protocol) out"
        )
    if configuration.protocol == "ucx":
        dask.config.set(connection_config(configuration.worker_options) | transfer_config())
        import_ucx()
    if configuration.protocol == "tls" and sys.platform == "linux":  # on macOS it may start threads
        # Reads the certificates of all the world's authorities, which nobody here asks for, once in each process: 20 ms.
        # In older versions of tornado it is no function, and is read when that is imported.
        if callable(read := getattr(sys.modules.get("tornado.netutil"), "_client_ssl_defaults", None)):
            read()
    # distributed.utils.get_mp_context imports every optional package it knows (pandas and friends, a second) before it starts
    # a fork server; ours is there already.
    sys.modules["distributed.utils"]._forkserver_preload_set = True  # type: ignore[attr-defined]
    parent = (
        configuration.local_directory or dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    )
    try:
        os.getcwd()
    except FileNotFoundError:  # it was deleted, and multiprocessing can't start a process without one
        os.chdir("/")
    scratch = os.path.join(os.path.abspath(parent), f"dgm-{os.urandom(8).hex()}")
    # Everything of Dask's, the scheduler's as well, goes where it is removed at the end.
    dask.config.set({"temporary-directory": scratch})
    logs.set_up(configuration.log_level, scratch, quiet_stream=configuration.log_directory is not None)
    return scratch


def _end_children() -> None:
    """End what tasks in this process have left running, pools for example, as Python does at its exit, which is left out here."""
    for process in active_children():
        if process.daemon:
            with contextlib.suppress(OSError):
                process.terminate()


def _leave_gpus_alone() -> None:
    """Have the nannies here ask nothing of NVML, once and for all: they have no GPU, and wait for each other in the driver.

    By way of the configuration, which is read once and is as it was for the workers.
    """
    import dask
    from distributed.diagnostics import nvml

    with dask.config.set({"distributed.diagnostics.nvml": False}):
        nvml.init_once()  # type: ignore[no-untyped-call]


def _in_process(worker_class: str | type) -> bool:
    """Whether tasks will run in the agent itself: everything but a Nanny, or what makes Nannies."""
    from distributed import Nanny

    from .worker_options import import_worker_class

    if worker_class == "auto":
        return False
    cls = import_worker_class(worker_class)
    return not (issubclass(cls, Nanny) or cls.__name__ == "CUDAWorker")


class Agent:
    """The event loop's side of the agent."""

    def __init__(
        self,
        configuration: Configuration,
        scratch: str,
        lifeline: int,
        reply: int,
        reader: FrameReader,
        timeline: Timeline,
        *,
        watched: bool,
    ) -> None:
        self.configuration = configuration
        self._watched = watched
        self._timeline = timeline
        self.scratch = scratch
        self._lifeline = lifeline
        self._reply = reply
        self._reader = reader
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: list[Any] = []
        self._scheduler: Any = None
        self._scheduler_pipe: Any = None
        self._closing = False
        self._joined = False
        self._scheduler_file: tuple[str, str] | None = None
        self._ucx: asyncio.Future[None] | None = None

    async def run(self, frames: list[Any]) -> None:
        """Obey until the lifeline ends, then close everything within the grace."""
        loop = asyncio.get_running_loop()
        if self.configuration.protocol == "ucx" and not _in_process(self.configuration.worker_class):
            # The nannies connect from here, and it takes a second until they can: meanwhile the scheduler starts. Each worker's
            # process is given its own GPU.
            hide_gpus(os.environ)
            self._ucx = start_ucx_aside()
        os.set_blocking(self._lifeline, False)
        parent = os.getppid()

        def look_for_parent() -> None:
            # The lifeline tells at once; but a process that the rank has forked may hold it open.
            if os.getppid() != parent:
                self._stop.set()
            else:
                loop.call_later(1.0, look_for_parent)

        look_for_parent()
        if self._watched:
            watch_fork_server(loop, self._on_fork_server_end)
        for frame in frames:
            self._obey(frame)
        if not self._joined:
            StartWatch(
                parent,
                self.configuration.mpi_deadline,
                speaks=self.configuration.speaks,
                over=lambda: self._joined or self._stop.is_set(),
            ).begin()
        loop.add_reader(self._lifeline, self._on_lifeline)
        await self._stop.wait()
        loop.remove_reader(self._lifeline)
        await self._close()

    def tell(self, *frame: Any) -> None:
        """Send an answer to the rank."""
        try:
            write_frame(self._reply, frame)
        except OSError:
            self._stop.set()  # the rank is gone

    def _on_fork_server_end(self) -> None:
        """Nothing can be started here any more, and what was has died: the rank starts another agent."""
        self.tell("ended", "its fork server has died")
        os._exit(1)

    def _on_lifeline(self) -> None:
        try:
            chunk = os.read(self._lifeline, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._stop.set()
            return
        try:
            frames = self._reader.feed(chunk)
        except Exception as error:  # a class that can't be found again here, say
            self.tell("failed", f"the agent can't read its orders: {type(error).__name__}: {error}", 1)
            return
        for frame in frames:
            self._obey(frame)

    def _obey(self, frame: tuple[str, Any]) -> None:
        command, payload = frame
        self._joined = True
        if command == "joined":
            return
        if command == "close":
            self._stop.set()
            return
        if command == "scheduler-file":
            self._scheduler_file = payload
            return
        actions: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {
            "scheduler": self._start_scheduler,
            "workers": self._start_workers,
            "dashboard": self._show_dashboard,
            "close-workers": self._close_workers,
        }
        task = asyncio.get_running_loop().create_task(self._guard(actions[command](payload)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, action: Coroutine[Any, Any, None]) -> None:
        try:
            await action
        except DaskGpuMpiError as error:
            self.tell("failed", str(error), error.exit_code)
        except Exception as error:
            logger.debug("the agent failed", exc_info=True)
            self.tell("failed", f"{type(error).__name__}: {error}", 1)

    async def _start_scheduler(self, settings: SchedulerSettings) -> None:
        begun = time.time()
        context = get_context("forkserver")
        self._scheduler_pipe, child_end = context.Pipe()
        process = context.Process(
            target=run_scheduler, args=(settings, child_end), name="dask_gpu_mpi scheduler", daemon=True
        )
        process.start()
        child_end.close()
        self._scheduler = process
        loop = asyncio.get_running_loop()
        up: asyncio.Future[tuple[Any, ...]] = loop.create_future()

        def on_message() -> None:
            try:
                message = self._scheduler_pipe.recv()
            except (EOFError, OSError):
                message = ("failed", "the scheduler's process ended before it listened", 1)
            loop.remove_reader(self._scheduler_pipe.fileno())
            up.set_result(message)

        loop.add_reader(self._scheduler_pipe.fileno(), on_message)
        message = await up
        self._timeline.add([Step("scheduler", "start", begun, time.time())])
        self.tell(*(("scheduler", *message[1:]) if message[0] == "up" else message))
        if message[0] == "up":
            loop.add_reader(process.sentinel, self._on_scheduler_end)

    def _on_scheduler_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._scheduler.sentinel)
        self._scheduler.join()
        if not self._stop.is_set():
            self.tell("scheduler-ended", self._scheduler.exitcode)

    async def _start_workers(
        self, payload: tuple[WorkerSettings, tuple[WorkerPlan, ...], dict[str, Any]]
    ) -> None:
        import dask
        from distributed import Nanny

        settings, plans, config = payload
        dask.config.set({"scheduler-address": settings.address, **config})
        if settings.log_directory is not None and plans:
            logs.log_to_file(settings.log_directory, f"rank-{plans[0].rank}-{plans[0].host}")
        if self._ucx is not None:
            await self._ucx  # it changes the environment meanwhile, which the constructors read
        if settings.delay:
            await asyncio.sleep(settings.delay)
        for plan in plans:
            # One after the other: the constructors read the environment. They start together, below.
            with self._timeline.step("make", f"worker {plan.name}"):
                self._workers.append(_make(plan, settings))
        kill_at_once()
        for nanny in _nannies(self._workers):
            if isinstance(nanny, Nanny):
                measure_less(nanny)
                listen_on_tcp(nanny)
        reasons = {id(nanny): closing_reason(nanny) for nanny in _nannies(self._workers)}
        workers = list(zip(plans, self._workers, strict=True))
        await asyncio.gather(*(self._start_worker(plan, worker) for plan, worker in workers))
        if self._ucx is not None and plans:
            stop_watching_ucx()  # its nannies have registered, over connections of their own
        self.tell("ready", len(plans), self._timeline.take())
        failed = await asyncio.gather(*(self._follow(plan, worker, reasons) for plan, worker in workers))
        if plans and not self._closing and not self._stop.is_set():
            self.tell("workers-ended", any(failed))

    async def _start_worker(self, plan: WorkerPlan, worker: Any) -> None:
        pids: set[int] = set()
        watch = asyncio.ensure_future(_collect_pids(worker, pids))
        try:
            with self._timeline.step("start", f"worker {plan.name}"):
                await worker
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            gpu = f" (GPU {plan.device})" if plan.device else ""
            words = next(filter(None, (logs.last_words(self.scratch, pid) for pid in sorted(pids))), "")
            text = f"worker {plan.name}{gpu} did not start: {type(cause).__name__}: {cause}"
            raise DaskGpuMpiError(text + (f"; its last words:\n{words}" if words else "")) from error
        finally:
            watch.cancel()

    async def _follow(self, plan: WorkerPlan, worker: Any, reasons: dict[int, Callable[[], str]]) -> bool:
        """Wait until a worker has ended for good; True when it failed."""
        nannies = [nanny for nanny in _nannies([worker]) if hasattr(nanny, "instantiate")]
        watches = [asyncio.ensure_future(watch_nanny(nanny)) for nanny in nannies]
        await worker.finished()
        why = next((watch.result() for watch in watches if watch.done() and not watch.cancelled()), "")
        for watch in watches:
            watch.cancel()
        failed = bool(why) or any(reasons[id(nanny)]().startswith("nanny-inst") for nanny in nannies)
        if failed and not self._closing and not self._stop.is_set():
            self.tell("worker-failed", plan.name, why or "its nanny could not start it again")
        return failed

    async def _show_dashboard(self, _: Any) -> None:
        if self._scheduler_pipe is not None:
            self._scheduler_pipe.send("dashboard")

    async def _close_workers(self, _: Any = None) -> None:
        """Close the workers politely, and by force what is left after the grace."""
        logs.set_ending()
        self._closing = True
        workers, self._workers = self._workers, []
        grace = self.configuration.grace
        for worker in workers:
            _leave_files(worker)
        closing = [asyncio.ensure_future(self._close_worker(worker, grace)) for worker in workers]
        with self._timeline.step("close workers"):
            if closing:
                await asyncio.wait(closing, timeout=grace)
        for pid in filter(None, map(_process_of, _nannies(workers))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.tell("closed", self._timeline.take())

    async def _close(self) -> None:
        """Close what is still open: workers first, so that they find the scheduler until they are gone."""
        if self._scheduler_file is not None:
            remove_scheduler_file(*self._scheduler_file)
        for task in self._tasks:
            task.cancel()
        await self._close_workers()
        if self._scheduler is not None and self._scheduler.is_alive():
            with contextlib.suppress(OSError):
                self._scheduler_pipe.send("close")
            self._scheduler.join(timeout=self.configuration.grace)
            if self._scheduler.is_alive():
                self._scheduler.kill()
                self._scheduler.join(timeout=1)

    @staticmethod
    async def _close_worker(worker: Any, grace: float) -> None:
        try:
            await worker.close(timeout=grace * 0.8)
        except Exception:
            logger.debug("a worker did not close", exc_info=True)


def _make(plan: WorkerPlan, settings: WorkerSettings) -> Any:
    """`make_worker`; what the class raises is told with the worker's name."""
    try:
        return make_worker(plan, settings)
    except DaskGpuMpiError:
        raise
    except Exception as error:
        raise DaskGpuMpiError(
            f"worker {plan.name} could not be made: {type(error).__name__}: {error}"
        ) from error


def _nannies(workers: list[Any]) -> list[Any]:
    return [nanny for worker in workers for nanny in getattr(worker, "nannies", [worker])]


def _leave_files(worker: Any) -> None:
    """Have a worker that is closed here leave its directory alone, which goes with the scratch: this loop would wait for that."""
    with contextlib.suppress(AttributeError):  # in another version of distributed; a class of the user's
        worker._workdir._finalizer.detach()
    for nanny in _nannies([worker]):
        if (process := getattr(nanny, "process", None)) is not None:
            process.worker_dir = None


async def _collect_pids(worker: Any, pids: set[int]) -> None:
    """Remember the processes of a worker that is starting: where they left their last words."""
    while True:
        pids.update(filter(None, map(_process_of, _nannies([worker]))))
        await asyncio.sleep(0.02)


def _process_of(nanny: Any) -> int | None:
    process = getattr(nanny, "process", None)
    return getattr(process, "pid", None)
