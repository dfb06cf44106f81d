"""A running agent: it carries out its rank's orders, in one event loop, until the control pipe ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from dask_gpu_mpi.agent.forkserver import watch_fork_server
from dask_gpu_mpi.agent.orders import Answer, Configuration, Order, SchedulerSettings, failed
from dask_gpu_mpi.agent.scheduler import SchedulerProcess
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.nvidia import hide_gpus
from dask_gpu_mpi.mpi.watchdogs import StartWatch
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.network.ucx import (
    disable_gpu_transports,
    start_ucx_in_thread,
    stop_watching_ucx,
    transfer_config,
)
from dask_gpu_mpi.options.model import WorkerUcx
from dask_gpu_mpi.plan.model import Start
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.lifecycle import Workers

logger = logging.getLogger("dask_gpu_mpi")

#: Seconds between checks whether the rank is still the parent.
PARENT_INTERVAL = 1.0


class Agent:
    """Receives orders by `reader`, from the control pipe, and sends answers to the descriptor `reply`.

    `scratch` is the agent's directory. `own_server`: the fork server is ours, and has to be watched. `tasks_here`: tasks run in
    this process (`worker_class.tasks_run_in_agent`).
    """

    def __init__(
        self,
        configuration: Configuration,
        scratch: str,
        reader: FrameReader,
        reply: int,
        timeline: Timeline,
        *,
        own_server: bool,
        tasks_here: bool,
    ) -> None:
        self._configuration = configuration
        self._options = options = configuration.options
        self._reader = reader
        self._reply = reply
        self._timeline = timeline
        self._own_server = own_server
        self._tasks_here = tasks_here
        self._parent = os.getppid()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Whether the rank has joined the others, and whether it has also been told to start something here.
        self._joined = self._started = False
        self._scheduler_file: tuple[str, str] | None = None
        self._ucx: asyncio.Future[None] | None = None
        self._scheduler = SchedulerProcess(timeline, self._on_scheduler_end, self.answer)
        self._workers = Workers(options, scratch, timeline, self._on_worker_end)

    async def run(self, orders: list[Any]) -> None:
        """Carry out these orders and all later ones until the control pipe ends; then close everything within the grace."""
        loop = asyncio.get_running_loop()
        if self._options.protocol.moves_device_memory and not self._tasks_here:
            # The nannies connect from here, which is possible after a second. Meanwhile the scheduler starts. Each worker's
            # process gets its GPU later.
            hide_gpus(os.environ)
            disable_gpu_transports(os.environ)
            self._ucx = start_ucx_in_thread()
        self._check_parent()
        if self._own_server:
            watch_fork_server(loop, self._on_fork_server_end)
        for order in orders:
            self._carry_out(*order)
        if not self._started:
            StartWatch(
                self._parent,
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
        if os.getppid() != self._parent:
            self._stop.set()
        else:
            asyncio.get_running_loop().call_later(PARENT_INTERVAL, self._check_parent)

    def _on_fork_server_end(self) -> None:
        """No process can be started here any more, and those that were have died: the rank starts another agent."""
        self.answer(Answer.ENDED, "its fork server has died")
        os._exit(1)

    def _on_scheduler_end(self, exit_code: int | None) -> None:
        if not self._stop.is_set():
            self.answer(Answer.SCHEDULER_ENDED, exit_code)

    def _on_worker_end(self, name: str | int, why: str | None) -> None:
        if not self._stop.is_set():
            self.answer(Answer.WORKER_ENDED, name, why)

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
        if plans and not self._workers.closing and not self._stop.is_set():
            self.answer(Answer.WORKERS_ENDED, has_failed)

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
