"""An agent: it imports Dask, is configured, forks its fork server (`run`), and then carries out its rank's orders (`Agent`).

`handle.AgentProcess` starts it, through `boot`, without MPI and without the launcher's variables. Its `__main__` is empty, so
the user's script never runs again in a worker. It reads frames from standard input, the control pipe. At end of file the rank has
ended or closes the agent, and everything here ends within the grace. Answers go through another pipe. Standard output and error
are the rank's, so what tasks print is in the job's output.

The order matters: import while there is one thread, then configure, then fork the fork server, then start the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from typing import Any

from dask_gpu_mpi.agent.dashboard_gate import NO_WORKER_ROUTES, asks_for_server
from dask_gpu_mpi.agent.forkserver import (
    become_fork_server,
    become_resource_tracker,
    leave_deleted_directory,
    watch_fork_server,
)
from dask_gpu_mpi.agent.orders import Answer, Configuration, Order, SchedulerSettings, failed
from dask_gpu_mpi.agent.scheduler import SchedulerProcess
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import away_from_here
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import UNCONFIGURED
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem, StartupError
from dask_gpu_mpi.machine.gpu_probe import collect
from dask_gpu_mpi.machine.nvidia import hide_gpus, is_profiled
from dask_gpu_mpi.machine.scratch import local_directory, make_scratch, remove_scratch
from dask_gpu_mpi.mpi.watchdogs import StartWatch
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.network.ucx import (
    connection_config,
    disable_gpu_transports,
    extend_handshakes,
    import_ucx,
    in_thread,
    missing_ucx,
    start_ucx,
    stop_watching_ucx,
    transfer_config,
)
from dask_gpu_mpi.options.dask_config import import_config
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.model import Start
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.lifecycle import Workers
from dask_gpu_mpi.workers.worker_options import tasks_run_in_agent

logger = logging.getLogger("dask_gpu_mpi")

#: Modules that workers need; `distributed` alone imports these at the first use, in every worker again.
PRELOAD = ("distributed", "distributed.nanny", "distributed.worker", "distributed.scheduler")
#: Modules that workers and the scheduler import later: a dozen files for each process. Other versions do not have all of them.
PRELOAD_LATER = (
    "numpy.random",
    "multiprocessing.popen_forkserver",
    "multiprocessing.synchronize",
    "tornado.platform.asyncio",
    "dask_gpu_mpi.workers.plugins",
    *(
        f"distributed.http.{name}"
        for name in ("worker", "worker.prometheus", "prometheus", "health", "statics")
    ),
    *(f"distributed.http.scheduler{name}" for name in ("", ".prometheus", ".info", ".json")),
)
#: Seconds in which UCX has to put its hooks in place. It needs one.
HOOKS = 60.0
#: Seconds between checks whether the rank is still the parent.
PARENT_INTERVAL = 1.0


def run(
    control: int,
    reply: int,
    timeline: Timeline,
    *,
    rank: int,
    cuda: bool,
    hooks: threading.Thread | None,
    look: int | None,
) -> None:
    """Import (with `cuda`, dask_cuda too), be configured, fork, and serve until the control pipe ends.

    `control` and `reply` are the file descriptors of orders and answers, `rank` is the process id of the rank, `hooks` is
    the thread that puts UCX's hooks into CUDA's library, and `look` is the process id of the child that probes the GPUs.
    """
    _import_dask(cuda=cuda)
    timeline.lap("import")
    if hooks is not None:
        hooks.join(HOOKS)
        if hooks.is_alive():  # a process forked now would have half of them
            raise StartupError(
                f"UCX has not put its hooks into CUDA's library within {HOOKS:g} s",
                fix="have the environment on a faster file system or in a container image, or choose --protocol tls",
            )
        timeline.lap("wait for UCX's hooks")
    reader = FrameReader(control)
    frames: list[Any] = []
    while not frames:
        frames = reader.read(timeout=UNCONFIGURED)
        if reader.eof:
            return
    configuration, *orders = frames
    if not isinstance(configuration, Configuration):
        return  # the rank closes already
    scratch: str | None = None
    try:
        try:
            scratch, read = _configure(configuration.options, configuration.dask_config)
            configuration = replace(configuration, options=read)
            become_resource_tracker([control, reply], scratch)
            make_scratch(scratch)
            timeline.lap("configure")
            own_server = become_fork_server(scratch, [control, reply], (*PRELOAD, *PRELOAD_LATER))
            gc.enable()
            timeline.lap("fork")
        except DaskGpuMpiError as error:
            write_frame(reply, failed(error))
            return
        if look is not None:  # threads are allowed now; the child may hang in the driver
            threading.Thread(target=collect, args=(look,), name="look", daemon=True).start()
        if not tasks_run_in_agent(configuration.options.worker_class):
            # From here on the end of the control pipe and the check of the parent are enough, and leave time to clean up. (With
            # tasks in this process they are not: a task could keep the event loop busy.)
            die_with_parent(0)
        write_frame(reply, (Answer.PREPARED, scratch))
        agent = Agent(configuration, scratch, reader, reply, timeline, rank=rank, own_server=own_server)
        asyncio.run(agent.run(orders))
    finally:
        # Processes that tasks in this process have left, such as pools: Python ends them at its exit, which is left out here.
        for process in active_children():
            if process.daemon:
                with contextlib.suppress(OSError):
                    process.terminate()
        if scratch is not None:
            # workers that were killed a moment ago may still write there
            remove_scratch(scratch, within=configuration.options.shutdown_timeout)


def _import_dask(*, cuda: bool) -> None:
    """Import the modules that all processes forked from here share."""
    import_config()
    for name in PRELOAD:
        importlib.import_module(name)
    if cuda:
        # If it is missing or broken, the first GPU worker reports that; there may be none.
        with contextlib.suppress(Exception):
            importlib.import_module("dask_cuda")
    for name in PRELOAD_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Every worker sends its versions to the scheduler. They are kept after the first call, which reads eight files.
    with contextlib.suppress(AttributeError, KeyError):
        sys.modules["distributed.versions"].get_versions()


def _configure(options: Options, dask_config: dict[str, Any]) -> tuple[str, Options]:
    """Make all settings that belong before the fork; returns the scratch directory, not made yet, and the options as read."""
    import dask

    from dask_gpu_mpi.network.listeners import guard_listeners
    from dask_gpu_mpi.workers.plugins import SAFE_PATH
    from dask_gpu_mpi.workers.worker_options import read_worker_options

    guard_listeners()
    dask.config.update(dask.config.config, dask_config, priority="new")
    method = "spawn" if is_profiled(os.environ) else "forkserver"
    if method == "spawn":
        # A new Python searches the working directory first, where another user may have put a module. `NewProcess` removes it.
        os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH") or SAFE_PATH
    dask.config.set({"distributed.worker.multiprocessing-method": method})
    if not asks_for_server(options.worker_options):
        dask.config.set(NO_WORKER_ROUTES)
    worker_options = read_worker_options(options.worker_class, options.worker_options)
    needs_ucx = options.protocol.moves_device_memory or options.worker_ucx is WorkerUcx.ALL
    if needs_ucx and (missing := missing_ucx(device_memory=False)):
        raise InputError(
            f"protocol 'ucx': {missing.text}", fix=f"{missing.fix}; or leave protocol (--protocol) out"
        )
    if options.protocol.moves_device_memory:
        dask.config.set(connection_config(options.worker_options) | transfer_config())
        with away_from_here():
            import_ucx()
        extend_handshakes()
    # distributed.utils.get_mp_context imports every optional package (pandas and others, a second) before it starts a fork
    # server. Ours is already running.
    sys.modules["distributed.utils"]._forkserver_preload_set = True  # type: ignore[attr-defined]
    parent = local_directory(options.local_directory)
    leave_deleted_directory()
    scratch = os.path.join(os.path.abspath(parent), f"dgm-{os.urandom(8).hex()}")
    # All of Dask's files, the scheduler's too, go into the directory that is removed at the end.
    dask.config.set({"temporary-directory": scratch})
    logs.set_up(options.log_level, scratch, quiet_stream=options.log_directory is not None)
    return scratch, replace(options, worker_options=worker_options)


class Agent:
    """Receives orders by `reader`, from the control pipe, and sends answers to the descriptor `reply`.

    `scratch` is the agent's directory, `rank` the process id of the rank. `own_server`: the fork server is ours, and has to be
    watched.
    """

    def __init__(
        self,
        configuration: Configuration,
        scratch: str,
        reader: FrameReader,
        reply: int,
        timeline: Timeline,
        *,
        rank: int,
        own_server: bool,
    ) -> None:
        self._configuration = configuration
        self._options = options = configuration.options
        self._reader = reader
        self._reply = reply
        self._timeline = timeline
        self._own_server = own_server
        self._rank = rank
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Whether the rank has joined the others, and whether it has also been told to start something here.
        self._joined = self._started = False
        self._scheduler_file: tuple[str, str] | None = None
        self._ucx: asyncio.Future[None] | None = None
        self._scheduler = SchedulerProcess(
            timeline, partial(self._report_end, Answer.SCHEDULER_ENDED), self.answer
        )
        self._workers = Workers(options, scratch, timeline, partial(self._report_end, Answer.WORKER_ENDED))

    async def run(self, orders: list[Any]) -> None:
        """Carry out these orders and all later ones until the control pipe ends; then close everything within the grace."""
        loop = asyncio.get_running_loop()
        tasks_here = tasks_run_in_agent(self._options.worker_class)
        if self._options.protocol.moves_device_memory and not tasks_here:
            # The nannies connect from here, which is possible after a second. Meanwhile the scheduler starts. Each worker's
            # process gets its GPU later.
            hide_gpus(os.environ)
            disable_gpu_transports(os.environ)
            self._ucx = in_thread(start_ucx)
        self._check_parent()
        if self._own_server:
            watch_fork_server(loop, self._on_fork_server_end)
        for order in orders:
            self._carry_out(*order)
        if not self._started:
            StartWatch(
                self._rank,
                self._configuration.mpi_deadline,
                speaks=self._configuration.speaks,
                over=lambda: self._joined or self._stop.is_set(),
                started=lambda: self._started or self._stop.is_set(),
            ).begin()
        loop.add_reader(self._reader.fd, self._on_control)
        await self._stop.wait()
        loop.remove_reader(self._reader.fd)
        await self._close()

    def answer(self, answer: Answer, *payload: Any) -> None:
        """Send the rank an answer."""
        try:
            write_frame(self._reply, (answer, *payload))
        except OSError:
            self._stop.set()  # the rank is gone

    def _check_parent(self) -> None:
        # The end of the control pipe is noticed at once, but a process that the rank has forked may hold the pipe open.
        if os.getppid() != self._rank:
            self._stop.set()
        else:
            asyncio.get_running_loop().call_later(PARENT_INTERVAL, self._check_parent)

    def _on_fork_server_end(self) -> None:
        """No process can be started here any more, and those that were have died: the rank starts another agent."""
        self.answer(Answer.ENDED, "its fork server has died")
        os._exit(1)

    def _report_end(self, answer: Answer, *payload: Any) -> None:
        """Report an end, unless the agent closes."""
        if not self._stop.is_set():
            self.answer(answer, *payload)

    def _on_control(self) -> None:
        orders: list[Any] = []
        try:
            orders = self._reader.read(0.0)
        except Exception as error:  # a class that can't be imported here, for example
            self.answer(
                Answer.FAILED, Problem(f"the agent can't read its orders: {type(error).__name__}: {error}")
            )
        for order in orders:
            self._carry_out(*order)
        if self._reader.eof:
            self._stop.set()

    def _carry_out(self, order: Order, payload: Any) -> None:
        self._joined = True
        self._started |= order is not Order.JOINED
        match order:
            case Order.JOINED:
                pass
            case Order.CLOSE:
                self._stop.set()
            case Order.SCHEDULER_FILE:
                self._scheduler_file = payload
            case Order.DASHBOARD | Order.LOST_RANK:
                self._scheduler.send(order, payload)
            case Order.START_SCHEDULER:
                self._begin(self._start_scheduler(payload))
            case Order.START_WORKERS:
                self._begin(self._run_workers(payload))
            case Order.CLOSE_WORKERS:
                self._begin(self._close_workers())

    def _begin(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, action: Coroutine[Any, Any, None]) -> None:
        try:
            await action
        except Exception as error:
            logger.debug("an order failed", exc_info=True)
            self.answer(*failed(error))

    async def _start_scheduler(self, settings: SchedulerSettings) -> None:
        self.answer(*await self._scheduler.start(self._options, settings))

    async def _run_workers(self, start: Start) -> None:
        """Start the workers, and wait until all have ended."""
        import dask

        plans = start.workers
        dask.config.set({"scheduler-address": start.address, **start.config})
        if (directory := self._options.log_directory) is not None and plans:
            logs.log_to_file(directory, f"rank-{plans[0].rank}-{plans[0].host}")
        if self._ucx is not None:
            await self._ucx  # that changes the environment, which the constructors read
        if start.transport.ucx is not WorkerUcx.OFF:
            dask.config.set(transfer_config())
        if start.delay:
            await asyncio.sleep(start.delay)
        await self._workers.start(start)
        if self._ucx is not None and plans:
            stop_watching_ucx()  # its nannies have registered
        self.answer(Answer.READY, len(plans), self._timeline.take())
        has_failed = await self._workers.follow()
        if plans and not self._workers.closing:
            self._report_end(Answer.WORKERS_ENDED, has_failed)

    async def _close_workers(self) -> None:
        await self._workers.close()
        self.answer(Answer.WORKERS_CLOSED)

    async def _close(self) -> None:
        """Close everything: workers first, so that they have a scheduler until they are gone."""
        if self._scheduler_file is not None:
            remove_scheduler_file(*self._scheduler_file)
        for task in self._tasks:
            task.cancel()
        await self._close_workers()
        self._scheduler.close(self._options.grace)
