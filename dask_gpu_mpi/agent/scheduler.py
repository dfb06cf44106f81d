"""The scheduler's process: a child of its rank's agent, so that neither a busy script nor busy nannies slow it down.

`SchedulerProcess` is the side of the agent, whose `part` starts it; `run_scheduler` runs in the process. Between them is a pipe:

- the process sends SCHEDULER_UP or FAILED once, and CLIENT when the first client has connected;
- the agent sends UP (the cluster is up), LOST (workers of a lost rank), STOP (end when the workers have left), CLOSE (end now).

The rest of the module changes Dask's scheduler: what a start of thousands of workers would wait for, the recorder of the job, the
dashboard's pages, and the option `default_workers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpu_mpi.agent.dashboard_gate import GuardedServer, guard_servers
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.timeline import RECORD_OPERATION, Step, Timeline
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.machine.nvidia import hide_gpus
from dask_gpu_mpi.network.interfaces import as_host
from dask_gpu_mpi.network.listeners import NO_SCHEDULER_ROUTES, report_no_server
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Kind, SchedulerSettings
from dask_gpu_mpi.workers.logs import log_to_file

if TYPE_CHECKING:
    from dask_gpu_mpi.view.job_watch import JobWatch

logger = logging.getLogger("dask_gpu_mpi")

#: Seconds that plugins and connections get to close; the process ends then in any case.
CLOSE_GRACE = 1.0
#: Seconds between looks whether all workers have left a cluster that ends.
LEFT_INTERVAL = 0.02
#: Seconds that the dashboard waits for the script's client to connect.
CLIENT_GRACE = 5.0


class SchedulerProcess:
    """The scheduler's process, for its agent; until `start`, `send` and `close` do nothing.

    It calls ``on_end(exit_code)`` if the process ends after it was up, and ``on_message(kind, payload)`` for later messages.
    """

    def __init__(
        self,
        timeline: Timeline,
        on_end: Callable[[int | None], None],
        on_message: Callable[[Kind, Any], None],
    ) -> None:
        self._timeline = timeline
        self._on_end = on_end
        self._on_later = on_message
        self._process: Any = None
        self._pipe: Any = None

    async def start(self, options: Options, settings: SchedulerSettings) -> tuple[Kind, Any]:
        """Start it, wait until it is up or has failed, and return its first message: `SCHEDULER_UP` or `FAILED`."""
        # A class of the script can't be pickled here, and the scheduler has no use for it.
        options = replace(options, worker_class="auto", worker_options={})
        begun = time.time()
        context = get_context("forkserver")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(
            target=run_scheduler,
            args=(options, settings, child_end),
            name="dask_gpu_mpi scheduler",
            daemon=True,
        )
        self._process.start()
        child_end.close()
        loop = asyncio.get_running_loop()
        first: asyncio.Future[tuple[Kind, Any]] = loop.create_future()
        loop.add_reader(self._pipe.fileno(), self._on_message, first)
        answer = await first
        self._timeline.add([Step("scheduler", "start", begun, time.time())])
        if answer[0] == Kind.SCHEDULER_UP:
            loop.add_reader(self._process.sentinel, self._on_sentinel)
        return answer

    def _on_message(self, first: asyncio.Future[tuple[Kind, Any]]) -> None:
        """An answer, or the end of the pipe."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            if first.done():
                return
            ended = Problem("the scheduler's process ended before it listened", fix="read its output above")
            message = (Kind.FAILED, Failure(ended))
        if first.done():
            self._on_later(*message)
        else:
            first.set_result(message)

    def _on_sentinel(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._on_end(self._process.exitcode)

    def send(self, kind: Kind, payload: Any = None) -> None:
        """Send it `Kind.UP`, `Kind.LOST`, `Kind.STOP` or `Kind.CLOSE`, if it is there."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._pipe.send((kind, payload))

    def close(self, grace: float) -> None:
        """End it within the grace, if necessary by force."""
        if self._process is not None and self._process.is_alive():
            self.send(Kind.CLOSE)
            self._process.join(timeout=grace)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(timeout=1)


def run_scheduler(options: Options, settings: SchedulerSettings, pipe: Any) -> None:
    """Run a scheduler until it is closed by a client or by the agent; the target of a process.

    It ends with the agent, whose end closes `pipe`.
    """

    async def serve_and_exit() -> None:
        # Not sys.exit, and inside the loop, which would wait for threads: those of Dask, or the import of the dashboard.
        code = await _serve(options, settings, pipe)
        flush()
        os._exit(code)

    try:
        asyncio.run(serve_and_exit())
    finally:
        flush()
        os._exit(1)


async def _serve(options: Options, settings: SchedulerSettings, pipe: Any) -> int:
    """Start the scheduler, report that through the pipe, and run it until its end; returns the exit code of the process."""
    from dask_gpu_mpi.view.job_watch import JobWatch

    # The dashboard's pages need bokeh.
    dashboard = options.dashboard and importlib.util.find_spec("bokeh") is not None
    _configure(settings, dashboard=dashboard)
    scheduler: Any = None
    try:
        if options.log_directory is not None:
            log_to_file(options.log_directory, f"scheduler-{socket.gethostname()}")
        scheduler = Scheduler(
            host=as_host(settings.listen),
            port=options.scheduler_port or 0,
            protocol=str(options.protocol),
            # The dashboard's import (bokeh) takes longer than the rest of the start: it follows when the cluster is up.
            dashboard=False,
            dashboard_address=options.dashboard_address,
        )
        # It listens already, and accepts no connection before the next turn of this loop.
        if dashboard and not isinstance(scheduler.services["dashboard"], GuardedServer):
            raise TypeError("this version of distributed has an HTTP server of another class")
        _compare_versions_once(scheduler)
        watch = JobWatch(settings.plan)
        watch.attach(scheduler)
        await scheduler
    except Exception as error:
        # Its constructor listens for HTTP only.
        pipe.send((Kind.FAILED, _failure(error, options, settings, of_dashboard=scheduler is None)))
        return 1
    if options.default_workers == "gpu":
        scheduler.add_plugin(GpuByDefault())
    http_port = None
    if dashboard:
        http_port = scheduler.services["dashboard"].port
        _warn_of_other_port(options, http_port)
    else:
        report_no_server(scheduler)
    _record(scheduler, from_start=options.recorded)
    pipe.send((Kind.SCHEDULER_UP, (scheduler.address, http_port, scheduler.id)))
    if settings.imports and settings.device:
        _import_first(scheduler, settings.imports)
    await _obey(scheduler, watch, pipe, dashboard=dashboard)
    # A scheduler that its client closed may still be closing the workers; one that we close may have plugins to close. With
    # bokeh 3.10.2 Scheduler.close raises; the job ends all the same.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(scheduler.close(reason="dask_gpu_mpi-ends"), CLOSE_GRACE)
    return 0


def _configure(settings: SchedulerSettings, *, dashboard: bool) -> None:
    """Make all settings of this process that belong before the scheduler's constructor."""
    import dask

    guard_servers(settings.token)
    # distributed would query NVML for device 0, and a lost one would end the scheduler.
    dask.config.set({"distributed.diagnostics.nvml": False, **settings.config})
    if settings.has_script:  # it may compute for long without tasks, and the scheduler ends with it
        dask.config.set({"distributed.scheduler.idle-timeout": None})
    if not dashboard:
        dask.config.set(NO_SCHEDULER_ROUTES)
    # It makes no CUDA context before it unpickles a graph that holds GPU objects.
    hide_gpus(os.environ, but=settings.device)
    # distributed warns when it uses another port for the dashboard because this one is in use; the link that we print has the
    # port. Tornado leaves the socket open that it could not bind, and Python warns of that.
    warnings.filterwarnings("ignore", message="(?s)Port .* is already in use")
    warnings.filterwarnings("ignore", message=r"unclosed <socket.*laddr=\(.*, 0\b", category=ResourceWarning)


def _warn_of_other_port(options: Options, port: int) -> None:
    wanted = options.dashboard_address.rpartition(":")[2]
    if port and "dashboard_address" in options.explicit and wanted not in ("", "0", str(port)):
        say(
            f"warning: dashboard: port {wanted} of {socket.gethostname()} is in use; the dashboard is at port {port}. Fix: "
            "another port in dashboard_address (--dashboard-address)"
        )


async def _obey(scheduler: Any, watch: JobWatch, pipe: Any, *, dashboard: bool) -> None:
    """Do what the agent orders, until it orders the end, or a client has closed the scheduler."""
    loop = asyncio.get_running_loop()
    ordered_to_end = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []  # the loop itself only holds them weakly

    def on_order() -> None:
        try:
            kind, payload = pipe.recv()
        except (EOFError, OSError):
            kind, payload = Kind.CLOSE, None
        if kind == Kind.UP:
            watch.report_client(lambda: pipe.send((Kind.CLIENT, None)))
            if dashboard:
                tasks.append(loop.create_task(_attach_dashboard(scheduler)))
        elif kind == Kind.LOST:
            watch.give_up(*payload)
        elif kind == Kind.STOP:
            tasks.append(loop.create_task(_set_without_workers(ordered_to_end, scheduler)))
        elif kind == Kind.CLOSE:
            loop.remove_reader(pipe.fileno())
            ordered_to_end.set()

    loop.add_reader(pipe.fileno(), on_order)
    finished = asyncio.ensure_future(scheduler.finished())
    ending = asyncio.ensure_future(ordered_to_end.wait())
    await asyncio.wait({finished, ending}, return_when=asyncio.FIRST_COMPLETED)


async def _set_without_workers(event: asyncio.Event, scheduler: Any) -> None:
    """Set the event when the workers have left, while their processes still end: those with a GPU take up to a second."""
    while scheduler.workers:
        await asyncio.sleep(LEFT_INTERVAL)
    event.set()


# What a start would wait for, and the recorder.


def _compare_versions_once(scheduler: Any) -> None:
    """Compare a new worker with each set of versions once, and not with every worker: of 3,000 that takes 5 ms."""
    module: Any = importlib.import_module("distributed.versions")
    compare, add = getattr(module, "error_message", None), scheduler.handlers.get("register-worker")
    if compare is None or add is None:  # in another version of distributed
        return
    known: dict[str, Any] = {}

    async def add_worker(comm: Any, *, versions: Any = None, **more: Any) -> Any:
        # one object for all workers whose versions are equal
        return await add(comm, versions=known.setdefault(repr(versions), versions), **more)

    def error_message(scheduler: Any, workers: dict[str, Any], *rest: Any, **more: Any) -> Any:
        return compare(scheduler, {id(each): each for each in workers.values()}, *rest, **more)

    scheduler.handlers["register-worker"] = add_worker
    module.error_message = error_message


def _import_first(scheduler: Any, modules: Collection[str]) -> None:
    """Import the script's modules in a thread, while workers and clients connect; graphs, which may hold their objects, wait."""

    def import_all() -> None:
        for module in modules:
            with contextlib.suppress(Exception, SystemExit):  # a graph that needs it shows the error
                importlib.import_module(module)

    imported = asyncio.get_running_loop().run_in_executor(None, import_all)
    update_graph = scheduler.stream_handlers["update-graph"]

    async def wait_and_update(**message: Any) -> Any:
        await asyncio.shield(imported)  # one client's end must not cancel it for others
        return await update_graph(**message)

    scheduler.stream_handlers["update-graph"] = wait_and_update


def _record(scheduler: Any, *, from_start: bool) -> None:
    """Record what the job does, for the report: from its start, or from the first request on."""

    def recorder() -> Any:
        from dask_gpu_mpi.view.recorder import recorder_of

        return recorder_of(scheduler, from_start=from_start)

    scheduler.handlers[RECORD_OPERATION] = lambda: recorder().record()
    if from_start:
        recorder()


# A start that fails.


def _failure(
    error: BaseException, options: Options, settings: SchedulerSettings, *, of_dashboard: bool
) -> Failure:
    while error.__cause__ is not None:
        error = error.__cause__
    elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
    if of_dashboard and elsewhere:
        problem = Problem(
            f"dashboard_address (--dashboard-address): {options.dashboard_address!r} is not on {socket.gethostname()}, "
            "where the scheduler runs",
            expected="an address of that node",
            fix="leave the option out, or give the port alone (':8787'), for all addresses of the node",
            what="ports",
        )
    elif isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        problem = Problem(
            f"port {options.scheduler_port} at {settings.listen} is in use: the scheduler can't listen there",
            fix="choose another port with scheduler_port (--scheduler-port), or leave it out for any free port",
            what="ports",
        )
    elif isinstance(error, InputError):
        return Failure.of(error)
    else:
        return Failure(Problem(f"the scheduler did not start: {type(error).__name__}: {error}"))
    return Failure(problem, InputError.exit_code)


# The dashboard's pages.


async def _attach_dashboard(scheduler: Any) -> None:
    """Import and attach the dashboard's pages, in a thread and after the first client.

    The import takes a second of this process and of a core, for which the script would wait while it connects.
    """
    try:
        loop = asyncio.get_running_loop()
        until = loop.time() + CLIENT_GRACE
        # one is always there: the scheduler's, for `fire_and_forget`
        while len(scheduler.clients) < 2 and loop.time() < until:
            await asyncio.sleep(0.25)
        module = await loop.run_in_executor(None, importlib.import_module, "distributed.dashboard.scheduler")
        _name_gpu_page(module, scheduler)
        server = scheduler.services["dashboard"]
        module.connect(server.application, server, scheduler, prefix="/")
    except Exception as error:  # a cluster without pages is better than none
        logger.warning("no dashboard: %s: %s", type(error).__name__, error)


def _name_gpu_page(module: Any, scheduler: Any) -> None:
    """Add the page of the GPUs to the navigation if there are GPU workers: distributed checks the scheduler's process."""
    if any("GPU" in worker.resources for worker in scheduler.workers.values()):
        pages = module.template_variables(scheduler)["pages"]  # of which it keeps one for each scheduler
        if "gpu" not in pages:
            pages.insert(pages.index("system") + 1, "gpu")


# The option `default_workers`.


class GpuByDefault(SchedulerPlugin):
    """Restricts tasks without restrictions to the workers with the resource ``GPU`` (the option `default_workers`).

    The tasks share one set of addresses, which changes as workers come and go: a waiting task is never bound to workers that
    have gone. (A restriction to the resource would do the same, but a shuffle by P2P chooses the workers of its output by
    addresses alone.) Before the first GPU worker has come, tasks run anywhere.
    """

    name = "dask_gpu_mpi-gpu-by-default"

    def __init__(self) -> None:
        #: Addresses of the GPU workers. Once there was one, the set is never empty, since to Dask that means no restriction:
        #: the last address stays, and tasks wait until its nanny has restarted it.
        self.addresses: set[str] = set()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by distributed before it looks for tasks that waited for this worker."""
        if scheduler.workers[worker].resources.get("GPU"):
            self.addresses.add(worker)
            if len(self.addresses) == 2:  # the other may be the last address, which stays
                self.addresses.intersection_update(scheduler.workers)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by distributed when a worker has gone."""
        if len(self.addresses) > 1:
            self.addresses.discard(worker)

    def update_graph(self, scheduler: Scheduler, *, tasks: Collection[Any], **kwargs: Any) -> None:
        """Called by distributed with the keys of new tasks, before they are sent to workers."""
        if not self.addresses:
            return
        for key in tasks:
            task = scheduler.tasks[key]
            if not (task.worker_restrictions or task.host_restrictions or task.resource_restrictions):
                task.worker_restrictions = self.addresses
