"""How one rank joins the cluster: its agent, MPI, what it sees, its part of the plan. The other side is `coordinator`."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer, Configuration, Order, SchedulerSettings, WorkerSettings
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import Step, Timeline, check_path
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.gpu_probe import hangs, nvml_grace
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.mpi import launcher_check, launchers
from dask_gpu_mpi.mpi.library import abort, load_mpi, load_ucx_first
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.network.interfaces import list_interfaces
from dask_gpu_mpi.network.reachability import Listener, Tokens, connect_only, connect_to
from dask_gpu_mpi.network.scheduler_file import Target, read_target, write_scheduler_file
from dask_gpu_mpi.network.ucx import connection_config, install_hooks
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.options.table import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.planner import PlacementOptions, Plan, make_plan
from dask_gpu_mpi.plan.roles import default_client
from dask_gpu_mpi.plan.scaling import configured_keys

from .coordinator import Coordinator, Go, Hello, Start
from .events import BRISK, Event, Post
from .progress import Progress

__all__ = ["COORDINATOR", "Bringup", "Joined", "expected_client"]

#: Rank that hears all others and makes the plan.
COORDINATOR = 0
#: Seconds beyond the start-up deadline after which a rank no longer believes that the coordinator lives.
COORDINATOR_GRACE = 30.0
#: Seconds beyond the start-up deadline after which a rank that is still inside MPI's own start is ended. Those that are already
#: out of it report in the first three (`Mailbox`); then the agents name stopped ranks (`startwatch.NAMING`).
MPI_GRACE = 6.0
#: Seconds for the ranks to find each other and report, where the options that say so can't be read.
WITHOUT_OPTIONS = 60.0
#: Options that must be the same on all ranks.
SHARED = (
    "layout",
    "protocol",
    "scheduler",
    "scheduler_rank",
    "client_rank",
    "cpu_workers",
    "gpus_per_worker",
    "require_idle_gpus",
    "name",
    "nthreads",
)


def expected_client(options: Options) -> int:
    """The rank that the layout gives the script to, unless the user chose another."""
    return default_client(options.layout, options.scheduler_rank, options.client_rank)


def configuration(options: Options, *, speaks: bool, mpi_deadline: float = math.inf) -> Configuration:
    """What an agent is told first. `speaks`: it reports if MPI has not come together at `mpi_deadline` (monotonic seconds)."""
    loaded = sys.modules.get("dask.config")
    return Configuration(
        worker_class=options.worker_class,
        worker_options=dict(options.worker_options),
        local_directory=options.local_directory,
        protocol=options.protocol,
        log_level=options.log_level,
        dask_config=dict(loaded.config) if loaded is not None else {},
        grace=grace(options),
        shutdown_timeout=options.shutdown_timeout,
        log_directory=options.log_directory,
        mpi_deadline=mpi_deadline,
        speaks=speaks,
    )


def grace(options: Options) -> float:
    """Seconds that workers get to close politely, well within the shutdown deadline."""
    return min(2.0, options.shutdown_timeout / 2)


def worker_settings(options: Options, start: Start, scratch: str) -> WorkerSettings:
    """What the workers of this rank have in common."""
    return WorkerSettings(
        address=start.address,
        protocol=start.protocol,
        host=start.listen,
        interface=options.interface,
        local_directory=scratch,
        death_timeout=max(options.startup_timeout, start.limit),
        delay=start.delay,
        worker_class=options.worker_class,
        worker_options=dict(options.worker_options),
        device_memory=start.device_memory,
        log_directory=options.log_directory,
    )


@dataclass
class Joined:
    """A rank that has joined.

    Attributes
    ----------
    post : Post
        Its messages and its agent.
    options : Options
        What the user asked for.
    environ : dict
        Environment to start another agent with.
    host : str
        Where it runs.
    go : Go
        The cluster; with the plan on the client rank and on the coordinator.
    start : Start
        Its part.
    has_scheduler : bool
        Whether the scheduler lives in its agent.
    scheduler_file : tuple or None
        Path and scheduler id, where this rank has written one.
    joins : bool
        Whether the cluster was there before this job.
    timeline : Timeline
        What this rank and its agent have done since the coordinator was last told.
    hosts, steps : dict
        On the coordinator, by rank: its host, and what it has told of its timeline.
    """

    post: Post
    options: Options
    environ: Mapping[str, str] = field(repr=False)
    host: str
    go: Go
    start: Start
    has_scheduler: bool
    scheduler_file: tuple[str, str] | None
    joins: bool
    timeline: Timeline
    hosts: dict[int, str] = field(default_factory=dict)
    steps: dict[int, list[Step]] = field(default_factory=dict)


class Bringup:
    """One rank's way into the cluster.

    Parameters
    ----------
    options : Options or InputError
        What the user asked for, or why that can't be: the error is reported by way of the coordinator, once for all ranks.
    environ : mapping
        The process's environment.
    comm : mpi4py.MPI.Intracomm or None
        None = ``COMM_WORLD``.
    has_client : bool
        Whether this rank has a script to run, should it be the client's.
    check : callable, optional
        ``check(rank)`` raises an InputError where this rank can't do what it is for.
    started : float
        ``time.monotonic()`` from which the deadlines count.
    signals : Signals
        A signal that comes meanwhile ends the start on all ranks.
    agent : AgentProcess or None
        The agent, started already; None where `options` is an error.
    timeline : Timeline
        Of this process.
    """

    def __init__(
        self,
        options: Options | InputError,
        environ: Mapping[str, str],
        *,
        comm: Any,
        has_client: bool,
        check: Callable[[int], None] | None,
        started: float,
        signals: Signals,
        agent: AgentProcess | None,
        timeline: Timeline,
    ) -> None:
        self._timeline = timeline
        self._signals = signals
        self._options = options
        self._environ = environ
        self._comm = comm
        self._has_client = has_client
        self._check = check
        self._timeout = options.startup_timeout if isinstance(options, Options) else WITHOUT_OPTIONS
        self._deadline = started + self._timeout
        self._host = socket.gethostname()
        self._joined_mpi = False
        self._early: list[Event] = []
        self._progress = Progress(started)
        self._agent = agent
        self._target: Target | None = None
        self._coordinator: Coordinator | None = None
        self._go: Go | None = None
        self._start: Start | None = None
        self._scheduler_config: dict[str, Any] | None = None
        self._file: tuple[str, str] | None = None
        self._credentials: dict[str, Any] | None = None
        #: What the user has configured of Dask's, on the coordinator.
        self._configured: frozenset[str] = frozenset()
        self._listener: Listener | None = None
        #: What came of connecting to the scheduler's host, once it is known.
        self._proofs: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def run(self) -> Joined:
        """Join.

        Raises
        ------
        DaskGpuMpiError
            The one report of what failed, the same on all ranks; printed already by the coordinator (`reported`).
        """
        # The messages of thousands of ranks stay until the cluster is up: looking through them for garbage again and again would
        # take longer than all the rest.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        except BaseException as error:
            if isinstance(error, DaskGpuMpiError) and error.fatal and not error.reported:
                say(f"error: {error}")
                error.reported = True
            if self._agent is not None:
                self._agent.close(1.0)
            if isinstance(error, DaskGpuMpiError) and error.fatal:
                abort(error.exit_code)
            if isinstance(error, Exception) and not isinstance(error, DaskGpuMpiError) and self._joined_mpi:
                # A defect of ours: the others can't know, and would wait for this rank.
                traceback.print_exc()
                abort(1)
            raise
        finally:
            if collecting:
                gc.enable()

    def _run(self) -> Joined:
        options, failure = self._options, None
        if isinstance(options, Options):
            assert self._agent is not None  # it has been started
            self._agent.configure(
                configuration(
                    options,
                    speaks=launchers.speaks(self._environ),
                    mpi_deadline=self._deadline + MPI_GRACE,
                )
            )
            self._timeline.lap("configure the agent")
        else:
            failure = Failure.of(options)
        if (
            isinstance(options, Options)
            and options.protocol.moves_device_memory
            and _may_be_client(options, self._environ)
        ):
            try:
                load_ucx_first()
            except InputError as error:
                failure = Failure.of(error)
        world = load_mpi(self._environ, self._host).COMM_WORLD
        self._timeline.lap("import mpi4py, MPI_Init")
        mailbox = Mailbox(
            self._comm if self._comm is not None else world,
            self._host,
            self._deadline,
            interrupted=lambda: _signalled(self._signals.got[0]) if self._signals.got is not None else None,
        )
        self._timeline.lap("join the ranks")
        self._joined_mpi = mailbox.size > 1
        self._post = Post(mailbox, self._agent)
        if self._agent is not None:
            self._agent.send(Order.JOINED)
        inventory: Inventory | None = None
        if isinstance(options, Options) and failure is None:
            try:
                inventory = self._look(options)
            except DaskGpuMpiError as error:
                failure = Failure.of(error)
            except OSError as error:
                failure = Failure(f"this host can't be looked at: {type(error).__name__}: {error}", 1)
        if self._post.rank == COORDINATOR:
            try:
                self._coordinator = self._make_coordinator(options)
            except InputError as error:
                failure = failure or Failure.of(error)
                self._coordinator = self._make_coordinator(error)
        self._post.send(COORDINATOR, "hello", self._hello(inventory, failure))
        return self._until_up()

    def _see(self) -> tuple[Gpu, ...] | None:
        """The GPUs as they were before anything of ours was on them; None where nobody was to look."""
        assert self._agent is not None  # it has been started
        where = f"rank {self._post.rank} of {self._post.size} on {self._host}"
        while True:
            try:
                seen = self._agent.gpus(0.1)
            except (InputError, StartupError) as error:
                raise type(error)(f"{where}: {error}") from error
            if seen is not None or not self._agent.looks:
                return seen
            if self._signals.got is not None:
                raise _signalled(self._signals.got[0]).error(reported=False)
            if time.monotonic() > self._deadline - nvml_grace(self._timeout):
                raise hangs(where)

    def _look(self, options: Options) -> Inventory:
        """What this rank sees, once its agent finds the options good."""
        if self._comm is None:
            library = load_mpi().Get_library_version()
            launcher_check.cross_check(
                self._environ, self._post.size, self._post.rank, self._host, library=library
            )
        if self._check is not None:
            self._check(self._post.rank)
        if self._post.rank == COORDINATOR:
            # Now, while the agent imports: where the user has configured anything of the kind, it imports Dask.
            self._configured = configured_keys()
            if options.scheduler and options.protocol.encrypts:
                self._credentials = _draw_credentials()
            self._timeline.lap("configuration, credentials")
        if self._post.rank == expected_client(options):
            # So does this, which the session will want, and the script.
            threading.Thread(target=_import_for_client, args=(options.protocol,), daemon=True).start()
        # First, since what it has to say may be why nobody has shown the GPUs.
        self._await_agent()
        inventory = take_inventory(
            self._post.rank,
            self._post.size,
            self._environ,
            device_options=device_options(options),
            look_for_gpus=options.worker_kind != "cpu",
            seen=self._see(),
        )
        self._timeline.lap("inventory")
        return inventory

    def _await_agent(self) -> None:
        """Wait until the agent has imported, and has found the options good."""
        assert self._agent is not None  # it has been started
        while time.monotonic() < self._deadline:
            for kind, *payload in self._agent.events(0.05):
                if kind == Answer.PREPARED:
                    self._timeline.lap("wait for the agent")
                    return
                if kind == Answer.FAILED:
                    raise Failure(*payload).error(reported=False)
            if self._agent.lost:
                raise StartupError(
                    f"the agent ended before it was ready ({self._agent.exit_text()}); its last words are above"
                )
            if self._signals.got is not None:
                raise _signalled(self._signals.got[0]).error(reported=False)
        raise StartupError(
            "the agent did not finish its imports within the start-up deadline (startup_timeout)"
        )

    def _hello(self, inventory: Inventory | None, failure: Failure | None) -> Hello:
        options = self._options
        known = isinstance(options, Options)
        return Hello(
            self._host,
            inventory,
            list_interfaces(),
            options.interface if isinstance(options, Options) else None,
            tuple((name, getattr(options, name)) for name in SHARED) if known else (),
            failure,
            self._has_client,
        )

    # -- the coordinator's rank ---------------------------------------------------------------------------------

    def _make_coordinator(self, options: Options | InputError) -> Coordinator:
        """The coordinator; with an error in place of options, one that can only gather failures."""
        join: tuple[str, str, dict[str, Any]] | None = None
        placement = PlacementOptions()
        credentials: Callable[[], dict[str, Any]] = dict
        if isinstance(options, Options):
            name = options.name
            if not options.scheduler:
                self._target = read_target(options)
                join = (self._target.address, self._target.protocol, self._target.config)
                name = self._target.unique_name(options.name)
            placement = placement_options(options, name=name)
            if options.timeline is not None:
                check_path(options.timeline, self._host)
            if options.protocol.encrypts:
                credentials = self._drawn_credentials
            elif options.protocol.moves_device_memory:
                credentials = functools.partial(connection_config, options.worker_options)

        def plan(inventories: list[Inventory], has_client: bool) -> Plan:
            with self._timeline.step("plan"):
                return make_plan(inventories, replace(placement, has_client=has_client))

        return Coordinator(
            self._post.size,
            protocol=options.protocol if isinstance(options, Options) else Protocol.TLS,
            plan=plan,
            send=self._post.send,
            credentials=credentials,
            join=join,
            deadline=self._deadline,
            hosts=self._post.mailbox.hosts,
            configured=self._configured,
            patient=isinstance(options, Options) and "startup_timeout" not in options.explicit,
        )

    def _drawn_credentials(self) -> dict[str, Any]:
        return self._credentials or _draw_credentials()

    def _tick(self, coordinator: Coordinator) -> None:
        now = time.monotonic()
        coordinator.tick(now)
        if coordinator.outcome is None:
            if self._progress.due(now):
                self._progress.show(now, *coordinator.progress())
        elif isinstance(coordinator.outcome, Go):
            self._progress.clear()
            self._go = coordinator.outcome
        else:
            error = coordinator.outcome
            self._progress.clear()
            # Before anybody else exits, since a launcher ends all ranks when one fails. (Ranks that are worlds of one, under a
            # foreign launcher, are all rank 0.)
            if (
                self._comm is not None
                or self._post.size > 1
                or not launcher_check.wait_for_rank_0_to_report(self._environ)
            ):
                say(f"error: {error}")
            error.reported = True
            if not error.fatal:  # else `run` aborts: who does not answer can't be told
                self._post.mailbox.send_all("fail", Failure.of(error))
                self._post.mailbox.flush(2.0)
            raise error

    # -- every rank ---------------------------------------------------------------------------------------------

    def _until_up(self) -> Joined:
        post = self._post
        told = False
        while self._go is None:
            if self._signals.got is not None and not told:
                told = True
                number = self._signals.got[0]
                post.send(COORDINATOR, "failed", _signalled(number))
            with contextlib.suppress(queue.Empty):
                failure = self._proofs.get_nowait()
                post.send(COORDINATOR, "failed" if failure else "reached", failure)
            events = post.events(BRISK)
            for number, event in enumerate(events):
                coordinator = self._coordinator
                if coordinator is None or not coordinator.handle(event, time.monotonic()):
                    self._on_event(event)
                if self._go is not None:
                    post.push_back(events[number + 1 :])
                    break
            if self._coordinator is not None:
                self._tick(self._coordinator)
            elif time.monotonic() > self._deadline + COORDINATOR_GRACE:
                raise StartupError(
                    f"rank {post.rank} on {self._host} heard nothing from rank 0 until the start-up deadline"
                )
        self._timeline.lap("ready: wait for go")
        post.push_back(self._early)
        assert isinstance(self._options, Options)  # else there is no plan
        assert self._start is not None  # nobody is ready before it
        has_scheduler = self._scheduler_config is not None
        if has_scheduler and post.agent is not None:
            post.agent.send(Order.DASHBOARD)
        elif not self._start.workers:
            post.drop_agent(1.0)  # nothing to do here: give its memory back
        return Joined(
            post,
            self._options,
            self._environ,
            self._host,
            self._go,
            self._start,
            has_scheduler,
            self._file,
            joins=not self._options.scheduler,
            timeline=self._timeline,
            hosts=coordinator.hosts if (coordinator := self._coordinator) is not None else {},
            steps=coordinator.steps if coordinator is not None else {},
        )

    def _on_event(self, event: Event) -> None:
        kind, payload = event.kind, event.payload
        if event.source is None:
            self._on_agent(kind, payload)
        elif kind == "scheduler":
            self._start_scheduler(*payload)
        elif kind == "probe":
            self._listen_for_ranks(*payload)
        elif kind == "prove":
            # In a thread: it may take seconds, and rank 0 has others to hear.
            threading.Thread(target=self._connect, args=payload, daemon=True).start()
        elif kind == "start":
            self._start_workers(payload)
        elif kind == "go":
            self._go = payload
        elif kind == "fail":
            raise payload.error(reported=True)

    def _on_agent(self, kind: str, payload: list[Any]) -> None:
        if kind == Answer.SCHEDULER_UP:
            self._scheduler_is_up(*payload)
        elif kind == Answer.READY:
            self._timeline.add(payload[1])
            self._tell_ready()
        elif kind == Answer.FAILED:
            self._post.send(COORDINATOR, "failed", Failure(*payload))
        elif kind == Answer.SCHEDULER_ENDED:
            text = f"the scheduler's process ended while the workers started (exit code {payload[0]})"
            self._post.send(COORDINATOR, "failed", Failure(text, 1))
        elif kind in (Answer.WORKER_FAILED, Answer.WORKERS_ENDED):
            self._early.append(Event(None, kind, payload))  # for `Member`, which counts them
        elif kind == Answer.LOST:
            self._post.send(
                COORDINATOR, "failed", Failure(f"its agent ended while it started ({payload[0]})", 1)
            )

    def _listen_for_ranks(self, address: str, tokens: Tokens) -> None:
        """Listen where the scheduler will, so that all ranks can prove that they reach it, before anything starts there."""
        options = self._options
        assert isinstance(options, Options)  # the coordinator only asks for this when all is well
        try:
            self._listener = Listener(address, options.scheduler_port or 0, tokens)
        except OSError:
            self._post.send(COORDINATOR, "probing", "")
        else:
            self._post.send(COORDINATOR, "probing", f"{address}:{self._listener.port}")

    def _connect(self, target: str, where: str, tokens: Tokens | None) -> None:
        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        error = connect_to(host, int(port), tokens).error if tokens else connect_only(host, int(port))
        text = (
            f"can't reach the scheduler's host at {target} ({where}): {error}; choose a network that leads there with interface "
            "(--interface), or let the port through the firewall"
        )
        self._proofs.put(Failure(text, 2) if error else None)

    def _start_scheduler(self, listen: str, config: dict[str, Any], device: str) -> None:
        options, agent = self._options, self._post.agent
        assert isinstance(options, Options)  # the coordinator only sends this when all is well
        self._scheduler_config = config
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if agent is not None:
            agent.send(
                Order.START_SCHEDULER,
                SchedulerSettings(
                    host=listen,
                    port=options.scheduler_port or 0,
                    protocol=options.protocol,
                    dashboard=options.dashboard,
                    dashboard_address=options.dashboard_address,
                    config=config,
                    device=device,
                ),
            )

    def _scheduler_is_up(self, address: str, http_port: int | None, identity: str) -> None:
        options = self._options
        assert isinstance(options, Options)  # as above
        assert self._scheduler_config is not None  # it was started with one
        if options.scheduler_file:
            try:
                write_scheduler_file(
                    options.scheduler_file, address, http_port, identity, self._scheduler_config
                )
            except InputError as error:
                self._post.send(COORDINATOR, "failed", Failure.of(error))
                return
            self._file = (os.path.abspath(options.scheduler_file), identity)
            if self._post.agent is not None:
                self._post.agent.send(Order.SCHEDULER_FILE, self._file)
        link = None
        if options.dashboard and http_port is not None:
            host = options.dashboard_address.rpartition(":")[0] or self._host
            link = f"http://{'localhost' if host == '127.0.0.1' else host}:{http_port}/status"
        self._post.send(COORDINATOR, "address", (address, link))

    def _tell_ready(self) -> None:
        self._timeline.lap("start workers")
        assert isinstance(self._options, Options)  # as above
        self._post.send(COORDINATOR, "ready", self._timeline.take() if self._options.timeline else [])

    def _start_workers(self, start: Start) -> None:
        options, agent = self._options, self._post.agent
        assert isinstance(options, Options)  # as above
        self._start = start
        self._deadline = max(self._deadline, time.monotonic() + start.limit)
        self._timeline.lap("hello: wait for the plan and the scheduler")
        if not start.workers:
            self._tell_ready()
        elif agent is not None:
            settings = worker_settings(options, start, agent.scratch or "")
            agent.send(Order.START_WORKERS, (settings, start.workers, start.config))


def _signalled(number: int) -> Failure:
    return Failure(f"{signal.Signals(number).name} came while the cluster started", 128 + number)


def _draw_credentials() -> dict[str, Any]:
    from dask_gpu_mpi.network.credentials import make_credentials

    return make_credentials().dask_config()


def _import_for_client(protocol: Protocol) -> None:
    """What the script's client needs, in a thread of its own; what can't be had is told where it is used.

    Not `ucxx` itself, which the client imports: it must not set what the user has configured before that is read.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("distributed")
        if protocol.moves_device_memory:
            install_hooks()
            importlib.import_module("distributed_ucxx")


def _may_be_client(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the script may run here, as far as the launcher tells: MPI, which knows, can't be asked before UCX is loaded."""
    launched = launchers.detect(environ)
    return launched is None or launched.rank == expected_client(options)
