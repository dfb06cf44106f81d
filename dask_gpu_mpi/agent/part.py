"""One rank's part in the job: its agent enters the job, registers, starts what the hub orders, and closes it at the end.

`agent.main` makes a `Part` in its event loop. The agent is between its rank and the hub: it passes on the messages for the other
one, and acts on the rest (`_on_rank`, `_on_hub`). Rank 0's agent has the hub itself, a `Leader`.

An order of the hub or the rank runs as a task (`_begin`), whose error is reported (`_fail`). The part ends by the hub's order END
(`_end_part`): workers close, then the scheduler. When the rank has ended, or closes the agent, `run` closes what is left, without
the hub (`_close`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.forkserver import end_left_behind
from dask_gpu_mpi.agent.hub import SILENT, Connection, connect, encode
from dask_gpu_mpi.agent.lead import Leader
from dask_gpu_mpi.agent.scheduler import SchedulerProcess
from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.plain_data import PlainDataError
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import FAILED_GRACE, FLUSH, KILLING, RANK_PATIENCE, closing_slack
from dask_gpu_mpi.errors import InputError, Problem, StartupError
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.gpu_probe import Look, nvml_grace
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.nvidia import closing_time
from dask_gpu_mpi.machine.scratch import exposed_fix, exposed_folder, exposed_text
from dask_gpu_mpi.mpi.launcher import close_launcher, report_lost_launcher
from dask_gpu_mpi.mpi.neighbours import NeighbourWatch, is_stopped, kill_rank, parent_of
from dask_gpu_mpi.network.credentials import add_token
from dask_gpu_mpi.network.interfaces import host_and_port, list_interfaces
from dask_gpu_mpi.network.reachability import Node, connect_to_peers, connection_errors, unreachable
from dask_gpu_mpi.network.scheduler_file import (
    Target,
    read_scheduler_file,
    remove_scheduler_file,
    write_scheduler_file,
)
from dask_gpu_mpi.network.ucx import PREFERS_SYSTEM, in_thread, transfer_config
from dask_gpu_mpi.options.convert import is_configured
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan import Start
from dask_gpu_mpi.startup.coordinator import shared_options
from dask_gpu_mpi.startup.messages import (
    COORDINATOR,
    Cluster,
    Configuration,
    Entry,
    Kind,
    Registration,
    SchedulerSettings,
)
from dask_gpu_mpi.startup.transport import ucx_ability
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.lifecycle import Workers

logger = logging.getLogger("dask_gpu_mpi")

#: Seconds between checks whether the rank is still the parent.
PARENT_INTERVAL = 1.0
#: Seconds in which the scheduler of another job must answer.
RUNNING = 1.0


class Part:
    """Receives messages of the rank by `reader`, and answers to the descriptor `reply`; see `messages.Kind`.

    `scratch`: the agent's directory. `rank`: the rank's process id. `gpu_answer`: the answer of the child that inspects the GPUs,
    if there is one.
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
        gpu_answer: Look | None = None,
    ) -> None:
        self._configuration = configuration
        self._options = options = configuration.options
        self._scratch = scratch
        self._reader = reader
        self._reply = reply
        self._timeline = timeline
        self._rank = rank
        self._gpu_answer = gpu_answer
        self._loop = asyncio.get_running_loop()
        #: The orders that run.
        self._tasks: set[asyncio.Task[None]] = set()
        #: When the start must be complete.
        self._deadline = configuration.deadline
        #: How this rank enters the job; None: it has not been ordered to.
        self._entry: Entry | None = None
        #: The way to the hub, after `_enter`: the hub itself (rank 0), or a connection.
        self._leader: Leader | None = None
        self._connection: Connection | None = None
        #: Failures of other ranks that rank 0 has sent before this agent is the leader.
        self._early: list[tuple[int, Failure]] = []
        self._workers = Workers(options, scratch, timeline, self._on_worker_end)
        #: Whether this rank runs the script.
        self._is_client = False
        self._scheduler = SchedulerProcess(timeline, self._on_scheduler_end, self._to_hub)
        #: Of the scheduler, if it is here; the scheduler file as path and id, as long as it has to be removed.
        self._settings: SchedulerSettings | None = None
        self._scheduler_file: tuple[str, str] | None = None
        #: Whether the cluster has been up with this agent, or one before it.
        self._up = False
        #: Whether this rank's workers and scheduler are closing, since the cluster is over.
        self._closing = False
        #: Whether the hub has sent its last order, so that the end of its connection is no loss.
        self._is_dismissed = False
        #: This rank's workers have closed; those of all ranks, so that the scheduler may; the scheduler, if it is here.
        self._workers_closed = asyncio.Event()
        self._released = asyncio.Event()
        self._part_closed = asyncio.Event()
        #: This agent is to end: its rank has ended, or has closed it.
        self._stop = asyncio.Event()

    async def run(self, frames: list[Any]) -> None:
        """Handle these messages of the rank and all later ones until it ends the agent; then close everything in time."""
        self._check_parent()
        if self._configuration.mpi_in_rank:
            self._begin(self._watch_rank())
        for frame in frames:
            self._on_rank(*frame)
        self._loop.add_reader(self._reader.fd, self._on_control)
        await self._stop.wait()
        self._loop.remove_reader(self._reader.fd)
        await self._close()

    # -- the rank -----------------------------------------------------------------------------------------------

    def _to_rank(self, kind: Kind, payload: Any = None, *, fds: Sequence[int] = ()) -> None:
        """Send the rank a message, and copies of these descriptors."""
        try:
            write_frame(self._reply, (kind, payload), fds=fds)
        except OSError:
            self._stop.set()  # the rank is gone

    def _check_parent(self) -> None:
        # The end of the control pipe is noticed at once, but a process that the rank has forked may hold the pipe open.
        if os.getppid() != self._rank:
            self._leave()
        else:
            self._loop.call_later(PARENT_INTERVAL, self._check_parent)

    async def _watch_rank(self) -> None:
        """End the rank if it waits in ``MPI_Init`` for ranks that never come, or has no launcher any more."""
        watch, launcher = NeighbourWatch(self._rank, self._deadline), parent_of(self._rank)
        while self._entry is None:
            await asyncio.sleep(PARENT_INTERVAL)
            try:
                watch.check(time.monotonic())
            except StartupError as error:
                report_error(error)
            else:
                if parent_of(self._rank) == launcher:
                    continue
                report_lost_launcher(self._rank, launcher)
            await asyncio.sleep(FAILED_GRACE)  # a launcher drops what it has not read when it ends the job
            kill_rank(self._rank)
            return

    def _on_control(self) -> None:
        for frame in self._reader.read(0.0):
            self._on_rank(*frame)
        if self._reader.eof:
            self._leave()

    def _leave(self) -> None:
        """The rank has ended: the hub must not wait for it, and if it is rank 0, the job is over."""
        if not self._stop.is_set():
            if self._leader is not None:
                self._leader.end()
            elif not self._is_dismissed:
                self._to_hub(Kind.GONE)
            self._stop.set()

    def _on_rank(self, kind: Kind, payload: Any) -> None:
        """Handle a message of the rank; pass it on if it is for the hub."""
        if kind == Kind.ENTER:
            self._begin(self._enter(payload))
        elif kind == Kind.CLOSE:
            self._leave()
        elif kind == Kind.FAILED:
            rank, failure = payload
            if self._leader is not None:
                self._leader.fail(rank, failure)
            elif self._connection is not None:
                self._to_hub(Kind.FAILED, failure)
            else:
                self._early.append((rank, failure))  # for the leader that this agent is about to become
        elif kind == Kind.FAIL:
            if self._leader is not None:
                self._begin(self._spread(self._leader, *payload))
        else:
            self._to_hub(kind, payload)

    async def _spread(self, leader: Leader, failure: Failure, fatal: bool) -> None:
        self._to_rank(Kind.ENDED, 0 if await leader.spread(failure, fatal) else 1)

    # -- the hub ------------------------------------------------------------------------------------------------

    def _to_hub(self, kind: Kind, payload: Any = None) -> None:
        """Send the hub a message."""
        if self._leader is not None:
            self._leader.send(kind, payload)
        elif self._connection is not None:
            self._connection.send(encode(kind, payload))

    def _fail(self, error: BaseException) -> None:
        """Report that this rank can't take part, or that an order has failed."""
        failure = Failure.of(error)
        if self._connection is None and self._leader is None:
            self._to_rank(Kind.FAILED, failure)
        elif not self._up:
            self._to_hub(Kind.FAILED, failure)
        elif not (self._closing or self._stop.is_set()):
            say(f"an agent on {socket.gethostname()} failed: {failure.problem}")
            os._exit(1)  # its rank starts another one; in order the hub would take both for lost

    async def _enter(self, entry: Entry) -> None:
        """Become the hub, or connect to it, and register, unless another agent of this rank has registered before."""
        self._entry = entry
        self._timeline.add(entry.steps)
        if entry.rank == COORDINATOR:
            await self._become_leader(entry)
        else:
            await self._connect(entry)
        # The rank keeps the connection open as well: if this agent is killed, the hub notices nothing, and the rank starts
        # another one. If the connection ends, both are gone, or their node.
        self._to_rank(Kind.ENTERED, fds=[] if self._connection is None else [self._connection.fd])
        if entry.again:
            self._up = True
            if not entry.workers:
                self._to_hub(Kind.WORKERS_ENDED, True)
            return
        await self._register(entry)

    async def _become_leader(self, entry: Entry) -> None:
        sock = socket.socket(fileno=self._reader.fds.pop()) if self._reader.fds else None
        leader = Leader(self._configuration, entry, self._timeline, self._on_hub, self._on_over)
        await leader.listen(sock)
        self._leader = leader
        for rank, failure in self._early:
            leader.fail(rank, failure)

    async def _connect(self, entry: Entry) -> None:
        left = max(1.0, self._deadline - time.monotonic())
        try:
            self._connection = await connect(entry.hub, entry.config, left)
        except OSError as error:
            why = str(error) or "no answer in time"
            raise unreachable(f"rank 0 at {entry.hub[0]}:{entry.hub[1]}", why) from None
        self._to_hub(Kind.ENTERED, (entry.rank, entry.again))
        self._begin(self._listen_to_hub(self._connection))

    async def _listen_to_hub(self, connection: Connection) -> None:
        """Handle the messages of the hub until the connection ends."""
        silent = False
        try:
            while True:
                self._on_hub(*await connection.receive())
        except (EOFError, PlainDataError):
            pass
        except OSError as error:
            silent = error.errno in SILENT
        if not (self._is_dismissed or self._stop.is_set()):
            # rank 0 is lost, and with it the job; or this rank
            self._is_dismissed = True
            self._to_rank(Kind.GONE, silent)
            self._begin(self._end_part())

    def _on_hub(self, kind: str, payload: Any) -> None:
        """Handle a message of the hub: an order is begun, others are passed on to the rank."""
        if self._stop.is_set():
            return
        match kind:
            case Kind.SCHEDULER:
                self._begin(self._start_scheduler(payload))
            case Kind.START:
                self._begin(self._run_workers(payload))
            case Kind.CONNECT:
                self._begin(self._reach_peers(payload))
            case Kind.UP:
                self._on_up(payload)
            case Kind.FAIL:
                self._is_dismissed = True
                self._to_rank(Kind.FAIL, payload)
            case Kind.LOST:
                self._scheduler.send(Kind.LOST, payload)
            case Kind.STOP:
                self._to_rank(Kind.STOP, payload)
                self._begin(self._close_part())
            case Kind.END:
                self._to_rank(Kind.END, payload)
                self._is_dismissed = True
                self._begin(self._end_part())
            case Kind.RELEASE:
                self._released.set()
            case Kind.DONE:
                self._is_dismissed = True
                self._to_rank(Kind.DONE, payload)
            case Kind.CLIENT | Kind.SIGNAL | Kind.BUSY:
                self._to_rank(Kind(kind), payload)

    def _on_up(self, cluster: Cluster) -> None:
        self._up = True
        if self._settings is not None:
            self._scheduler.send(Kind.UP)  # the dashboard may follow
        self._to_rank(Kind.UP, (cluster, self._is_client, self._settings is not None, self._scheduler_file))

    def _begin(self, action: Coroutine[Any, Any, None]) -> None:
        """Run an order as a task, and report its error."""
        task = self._loop.create_task(self._guard(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # one that is cancelled before it has begun is never awaited, of which Python would warn
        task.add_done_callback(lambda _: action.close())

    async def _guard(self, action: Coroutine[Any, Any, None]) -> None:
        try:
            await action
        except Exception as error:
            logger.debug("an order failed", exc_info=True)
            self._fail(error)

    # -- the inventory ------------------------------------------------------------------------------------------

    async def _register(self, entry: Entry) -> None:
        """Send the hub what it needs to know of this rank."""
        seen: tuple[Gpu, ...] | None = None
        if self._gpu_answer is not None:
            self._to_hub(Kind.STEP, "inspecting the GPUs (NVML)")
            where = f"rank {entry.rank} of {entry.size} on {socket.gethostname()}"
            seen = await self._gpus(self._gpu_answer, where)
        self._to_hub(Kind.STEP, "inspecting its cores, memory and networks, and the local directory")
        try:
            # a dead file system must not block the hub
            registration = await in_thread(lambda: self._inspect(entry, seen))
        except OSError as error:  # of a system call, with which a node is inspected
            raise StartupError(
                f"could not inspect this node (CPUs, memory, GPUs, network): {type(error).__name__}: {error}",
                fix="leave it out of the job",
            ) from None
        self._timeline.lap("inventory")
        if registration.ucx.system:
            os.environ[PREFERS_SYSTEM] = "true"  # `workers.factory` passes it on
        self._to_hub(Kind.REGISTRATION, registration)

    def _inspect(self, entry: Entry, seen: tuple[Gpu, ...] | None) -> Registration:
        options, configuration = self._options, self._configuration
        inventory = take_inventory(
            entry.rank, entry.size, os.environ, seen, pid=self._rank, contexts=configuration.contexts
        )
        return Registration(
            inventory.host,
            self._with_warnings(inventory, entry),
            list_interfaces(),
            options.interface,
            shared_options(options),
            has_client=configuration.has_client,
            ucx=ucx_ability(options, gpus=bool(inventory.gpus)),
        )

    def _with_warnings(self, inventory: Inventory, entry: Entry) -> Inventory:
        warnings = [*inventory.warnings]
        if folder := exposed_folder(os.path.dirname(self._scratch)):
            warnings.append(
                Problem(
                    f"host {inventory.host}: {exposed_text(folder)}",
                    fix=exposed_fix(folder, "another directory by local_directory (--local-directory)"),
                    what="scratch",
                    hosts=(inventory.host,),
                )
            )
        if opened := close_launcher(self._rank, by_script=not entry.closes_launcher):
            warnings.append(opened)
        return replace(inventory, warnings=tuple(warnings))

    async def _gpus(self, answer: Look, where: str) -> tuple[Gpu, ...]:
        """The GPUs as they were before anything of ours was on them."""
        until = self._deadline - nvml_grace(self._options.startup_timeout)

        def wait() -> tuple[Gpu, ...] | None:
            with contextlib.closing(answer):
                # an answer that has come is read, however late this agent is
                seen = answer.gpus(max(0.0, until - time.monotonic()))
                while seen is None and time.monotonic() < until:
                    seen = answer.gpus(max(0.0, until - time.monotonic()))
                return seen

        try:
            seen = await in_thread(wait)
        except (InputError, StartupError) as error:
            raise type(error)(replace(error.problem, where=where)) from error
        if seen is None:
            raise StartupError(
                "NVML did not respond before the start-up timeout (startup_timeout); the NVIDIA driver of this node "
                "probably hangs",
                fix="reset the GPUs or leave this node out of the job, or set CUDA_VISIBLE_DEVICES='' to do without GPUs",
                where=where,
            )
        return seen

    # -- the scheduler ------------------------------------------------------------------------------------------

    async def _start_scheduler(self, settings: SchedulerSettings) -> None:
        """Start it, write the scheduler file, and report its address."""
        options, plan = self._options, settings.plan
        if plan is not None:
            plan = replace(plan, warnings=(*options.warnings, *plan.warnings))
        # A cluster without encryption is open to everyone, and so is its dashboard.
        token = secrets.token_urlsafe(32) if options.protocol.encrypts else ""
        self._settings = settings = replace(
            settings, token=token, plan=plan, imports=self._configuration.imports
        )
        kind, payload = await self._scheduler.start(options, settings)
        if kind != Kind.SCHEDULER_UP:
            self._to_hub(Kind.FAILED, payload)
            return
        address, port, identity = payload
        link = dashboard_link(options, socket.gethostname(), port, token)
        if path := options.scheduler_file:
            self._to_hub(Kind.STEP, f"writing the scheduler file {path!r}")
            self._begin_warning(path, address)
            write_scheduler_file(path, address, port, identity, settings.config, link)
            self._scheduler_file = (os.path.abspath(path), identity)
        self._to_hub(Kind.ADDRESS, (address, link))

    def _begin_warning(self, path: str, address: str) -> None:
        """Warn, while the start goes on, if the file that this job is about to replace leads to another job that still runs."""
        with contextlib.suppress(InputError):  # there is none, or it is no scheduler file
            before = read_scheduler_file(path)
            if before.address != address:
                self._begin(warn_of_running_job(path, before))

    def _on_scheduler_end(self, code: int | None) -> None:
        """The scheduler's process has ended by itself; code 0: a client called shutdown()."""
        if self._closing or self._stop.is_set():
            return
        ended = f"the scheduler's process ended (exit code {code})"
        self._to_hub(Kind.OVER, (False, None if code == 0 else ended, None))

    # -- workers ------------------------------------------------------------------------------------------------

    async def _run_workers(self, start: Start) -> None:
        """Start the workers, and wait until all have ended."""
        import dask

        self._is_client = start.is_client
        self._to_rank(Kind.START, start.limit)
        self._timeline.lap("wait for the plan and the scheduler")
        dask.config.set({"scheduler-address": start.address, **start.config})
        if start.delay:
            await asyncio.sleep(start.delay)
        if start.scheduler:
            await self._reach_scheduler(start)
        # The hub may have sent this before it knew that the rank's workers have ended for good.
        plans = start.workers if self._entry is not None and self._entry.workers else ()
        if plans:
            if (directory := self._options.log_directory) is not None:
                logs.log_to_file(directory, f"rank-{plans[0].rank}-{plans[0].host}")
            if start.transport.ucx is not WorkerUcx.OFF or any(plan.kind == "gpu" for plan in plans):
                dask.config.set(transfer_config())
            await self._workers.start(replace(start, imports=self._configuration.imports))
        self._timeline.lap("start workers")
        steps = self._timeline.take() if self._options.recorded else []
        self._to_hub(Kind.READY, (steps, self._workers.address))
        if plans:
            has_failed = await self._workers.follow()
            if not self._closing:
                self._to_hub(Kind.WORKERS_ENDED, has_failed)

    async def _reach_scheduler(self, start: Start) -> None:
        """A nanny would try for longer, and its error would not show the cause."""
        # one that runs already may be busy
        (why,) = await connection_errors([start.address], patient=not self._options.scheduler)
        if why:
            scheduler = f"the scheduler at {start.address.partition('://')[2]} ({start.scheduler})"
            raise unreachable(
                scheduler, why, "" if self._options.scheduler else "check that the other job still runs, "
            )

    async def _reach_peers(self, peers: Sequence[Node]) -> None:
        """Connect to workers of other nodes."""
        self._to_hub(Kind.REACHED, await connect_to_peers(peers))

    def _on_worker_end(self, name: str | int, why: str | None) -> None:
        """A worker has ended for good: because it was retired (None), or has failed too often."""
        if self._stop.is_set() or self._closing:
            return
        self._to_hub(Kind.WORKER_ENDED, (name, why is not None))
        if why is not None:
            host = socket.gethostname()
            say(f"worker {name} on {host} removed: {why}")

    # -- the end ------------------------------------------------------------------------------------------------

    async def _close_part(self) -> None:
        """Close this rank's workers, then the scheduler: a worker that loses its scheduler logs many errors."""
        if not self._closing:
            self._closing = True
            self._remove_scheduler_file()
            if self._settings is not None:
                self._scheduler.send(Kind.STOP)
            try:
                await self._close_workers()
            except Exception:  # of a class of the user's; the others wait for this part
                logger.warning("could not close the workers of this rank", exc_info=True)
            self._workers_closed.set()
        await self._workers_closed.wait()
        self._to_hub(Kind.CLOSED)
        if self._settings is not None:
            options = self._options
            own = closing_time(options, os.environ) + 2.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(own + closing_slack(options.shutdown_timeout)):
                    await self._released.wait()
            self._released.set()
            await asyncio.to_thread(self._scheduler.close, options.grace)
        self._part_closed.set()
        self._to_rank(Kind.CLOSED)

    async def _close_workers(self) -> None:
        """Close the workers, and end what their tasks have left, once."""
        try:
            await self._workers.close()
        finally:
            if not self._workers_closed.is_set():  # it inspects all processes of the node
                await asyncio.to_thread(end_left_behind)

    async def _end_part(self) -> None:
        """End this rank's part; rank 0's ends when the job does (`_on_over`)."""
        await self._close_part()
        if self._leader is None:
            if self._connection is not None:
                await self._connection.flush(FLUSH)
            self._to_rank(Kind.ENDED, 0)
            await self._see_off()
            self._stop.set()

    async def _see_off(self) -> None:
        """Wait for the end of the rank. One that is stopped is continued, then killed: its launcher would wait for it forever.

        One that is not stopped stays: it may be a program that continues after its cluster.
        """
        for patience, number in ((RANK_PATIENCE, signal.SIGCONT), (KILLING, signal.SIGKILL)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._stop.wait()
            if self._stop.is_set() or not is_stopped(self._rank):
                return
            entry = self._entry
            say(
                f"warning: rank {entry.rank if entry else '?'} on {socket.gethostname()} does not end; it is sent "
                f"{signal.Signals(number).name}. Fix: find out what stopped it (a signal, a debugger, a file system)"
            )
            if number == signal.SIGKILL:
                kill_rank(self._rank)
            else:
                os.kill(self._rank, number)

    def _on_over(self, code: int) -> None:
        """Called by the leader when all ranks have closed: so ends the part of rank 0."""

        async def end() -> None:
            await self._part_closed.wait()
            self._to_rank(Kind.ENDED, code)
            self._stop.set()

        self._begin(end())

    def _remove_scheduler_file(self) -> None:
        if self._scheduler_file is not None:
            remove_scheduler_file(*self._scheduler_file)
            self._scheduler_file = None

    async def _close(self) -> None:
        """Close what is left, at the end of this agent: workers first, so that they have a scheduler until they are gone."""
        self._remove_scheduler_file()
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await self._close_workers()
        self._scheduler.close(self._options.grace)
        if self._leader is not None:
            await self._leader.close()
        elif self._connection is not None:
            await self._connection.flush(FLUSH)
            self._connection.close()


async def warn_of_running_job(path: str, before: Target) -> None:
    """Print a warning if the scheduler to which this file led before still accepts connections. Nothing waits for this."""
    place = host_and_port(before.address.partition("://")[2])
    try:
        if before.protocol is not None and before.protocol.encrypts:
            # with the other job's certificate, or its scheduler would log an error
            (await connect(place, before.config, RUNNING)).close()
        else:
            async with asyncio.timeout(RUNNING):
                (await asyncio.open_connection(*place))[1].close()
    except Exception:  # nobody answers, or the file has other certificates
        return
    say(
        f"warning: the scheduler file {path!r} is now of this job; the job that had written it, with its scheduler at "
        f"{before.address}, still runs. Fix: another file for each job (--scheduler-file)"
    )


def dashboard_link(options: Options, host: str, port: int | None, token: str) -> str | None:
    """The link to the dashboard, with its token if it has one; None without a dashboard (`port`)."""
    if port is None:
        return None
    listens = options.dashboard_address.rpartition(":")[0] or host
    scheme = "https" if is_configured("distributed.scheduler.dashboard.tls.cert") else "http"
    link = f"{scheme}://{'localhost' if listens == '127.0.0.1' else listens}:{port}/status"
    return add_token(link, token) if token else link
