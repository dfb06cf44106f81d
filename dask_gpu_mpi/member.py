"""One rank of the job, from its first line to its last: joins the cluster, serves it, leaves it.

Nothing here waits in a call that can't be interrupted; every wait has a deadline; and whichever way the rank leaves, its agent
has ended by then.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import launchers
from .coordinator import Coordinator, Failure, Go, Hello, Start
from .errors import ClusterLostError, DaskGpuMpiError, InputError, MpiMissingError, StartupError
from .inventory import Inventory, take_inventory
from .joining import Target, read_target
from .messages import Configuration, SchedulerSettings, WorkerSettings
from .network import list_interfaces
from .options import Options
from .placement import PlacementOptions, Plan, make_plan
from .rendezvous import Mailbox, load_mpi
from .supervisor import AgentProcess

__all__ = ["Member", "expected_client", "placement_options"]

#: Rank that hears all others and makes the plan.
COORDINATOR = 0
#: Seconds between looks at the messages: while starting, and afterwards (0.6 % of a core at most).
BRISK, CALM = 0.01, 0.1
#: Seconds that a worker rank goes on after SIGTERM, for the script's `finally` on the client rank.
TERM_GRACE = 5.0
#: Seconds beyond the start-up deadline after which a rank no longer believes that the coordinator lives.
COORDINATOR_GRACE = 30.0


def placement_options(options: Options, *, name: str | None = None) -> PlacementOptions:
    """What the plan needs of the options."""
    return PlacementOptions(
        layout=options.layout,
        cpu_workers=options.cpu_workers,
        nthreads=options.nthreads,
        memory_limit=options.memory_limit,
        worker_kind=options.worker_kind,
        name=name if name is not None else options.name,
        scheduler_rank=options.scheduler_rank,
        client_rank=options.client_rank,
    )


def expected_client(options: Options) -> int:
    """The rank that the layout gives the script to, unless the user chose another."""
    if options.client_rank is not None:
        return options.client_rank
    return 1 if options.layout == "exclusive" else 0


class Member:
    """See the module's text.

    Parameters
    ----------
    options : Options or InputError
        What the user asked for, or why that can't be: the error is reported by way of the coordinator, once for all ranks.
    environ : mapping
        The process's environment.
    comm : mpi4py.MPI.Intracomm or None
        None = ``COMM_WORLD``.
    leave_open : bool
        ``exit=False``: the rank goes on with work of its own when the cluster stops.
    check : callable, optional
        ``check(rank)`` raises an InputError where this rank can't do what it is for.

    Attributes
    ----------
    rank, size : int
        In `comm`.
    is_client : bool
        Whether the script runs here.
    go : Go or None
        Once the cluster is up.
    stopped : bool
        The cluster is down; the rank waits for the end of the script.
    ended : int or None
        Exit code, once the job ends.
    """

    def __init__(
        self,
        options: Options | InputError,
        environ: Mapping[str, str],
        *,
        comm: Any = None,
        leave_open: bool = False,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self.started = time.monotonic()
        self._options = options
        self._environ = environ
        self._comm = comm
        self._leave_open = leave_open
        self._check = check
        self.rank, self.size = 0, 1
        self.host = socket.gethostname()
        self.is_client = False
        self.go: Go | None = None
        self.stopped = False
        self.ended: int | None = None
        self.lost: str | None = None
        self.coordinator: Coordinator | None = None
        self._agent: AgentProcess | None = None
        self._mailbox: Mailbox | None = None
        self._start: Start | None = None
        self._target: Target | None = None
        self._signalled: tuple[int, float] | None = None
        self._parent = os.getppid()
        self._launched = launchers.detect(environ) is not None
        self._pump_lock = threading.Lock()
        self._without_workers: set[int] = set()
        self._closed_ranks: set[int] = set()
        self._released = False
        self._wound_down = False

    # -- joining ----------------------------------------------------------------------------------------------------------------

    def join(self) -> Go:
        """Bring this rank up, with all others.

        Returns
        -------
        Go
            The cluster is up.

        Raises
        ------
        DaskGpuMpiError
            The one report of what failed, the same on all ranks; printed already on rank 0 (`reported`).
        """
        try:
            return self._join()
        except BaseException:
            self.drop_agent(timeout=1.0)
            raise

    def _join(self) -> Go:
        options = self._options
        failure: DaskGpuMpiError | None = options if isinstance(options, InputError) else None
        if isinstance(options, Options):
            self._agent = AgentProcess(self._environ, cuda=_may_use_cuda(options, self._environ))
            self._configure(self._agent, options)
        try:
            if self._comm is None:
                self._comm = load_mpi().COMM_WORLD
        except MpiMissingError as error:
            # Without MPI nobody else can be told; of errors that are everybody's, one rank's word is enough.
            launched = launchers.detect(self._environ)
            error.reported = launched is not None and (launched.rank or 0) != 0
            raise
        timeout = options.startup_timeout if isinstance(options, Options) else 60.0
        deadline = self.started + timeout
        self._mailbox = Mailbox(self._comm, deadline)
        self.rank, self.size = self._mailbox.rank, self._mailbox.size
        inventory: Inventory | None = None
        try:
            if failure is None:
                if self._comm is _world():
                    launchers.cross_check(
                        self._environ,
                        self.size,
                        self.rank,
                        self.host,
                        library=load_mpi().Get_library_version(),
                    )
                if self._check is not None:
                    self._check(self.rank)
                inventory = take_inventory(
                    self.rank,
                    self.size,
                    self._environ,
                    look_for_gpus=isinstance(options, Options) and options.worker_kind != "cpu",
                )
                self._wait_until_prepared(deadline)
        except DaskGpuMpiError as error:
            failure = error
        if self.rank == COORDINATOR:
            try:
                self.coordinator = self._make_coordinator(options, deadline)
            except InputError as error:
                failure = failure or error
                self.coordinator = self._bare_coordinator(deadline)
        self._say_hello(inventory, failure)
        if failure is None and isinstance(options, Options) and self.rank == expected_client(options):
            # While the others start: the script will want it, and so does the session.
            threading.Thread(target=importlib.import_module, args=("distributed",), daemon=True).start()
        return self._until_up(deadline)

    @property
    def _grace(self) -> float:
        """Seconds that workers get to close politely."""
        return min(2.0, self._options.shutdown_timeout / 2) if isinstance(self._options, Options) else 0.5

    def _configure(self, agent: AgentProcess, options: Options) -> None:
        loaded = sys.modules.get("dask.config")
        agent.configure(
            Configuration(
                worker_class=options.worker_class,
                worker_options=dict(options.worker_options),
                local_directory=options.local_directory,
                log_level=options.log_level,
                dask_config=dict(loaded.config) if loaded is not None else {},
                grace=self._grace,
            )
        )

    def _wait_until_prepared(self, deadline: float) -> None:
        """The agent has imported everything and finds the options good."""
        assert self._agent is not None  # started above where the options are good
        while time.monotonic() < deadline:
            for event in self._agent.events(0.05):
                if event[0] == "prepared":
                    return
                if event[0] == "failed":
                    raise Failure(event[1], event[2]).error(reported=False)
            if self._agent.lost:
                raise StartupError(
                    f"the agent ended before it was ready ({self._agent.exit_text()}); its last words are above"
                )
        raise StartupError(
            "the agent did not finish its imports within the start-up deadline (startup_timeout)"
        )

    def _make_coordinator(self, options: Options | InputError, deadline: float) -> Coordinator:
        if isinstance(options, InputError):
            return self._bare_coordinator(deadline)
        join: tuple[str, str, dict[str, Any]] | None = None
        name = options.name
        if not options.scheduler:
            self._target = read_target(options)
            join = (self._target.address, self._target.protocol, self._target.config)
            name = self._target.unique_name(options.name)
        placement = placement_options(options, name=name)

        def credentials() -> dict[str, Any]:
            if options.protocol != "tls":
                return {}
            from .security import make_credentials

            return make_credentials().dask_config()

        return Coordinator(
            self.size,
            options,
            plan=lambda inventories: make_plan(inventories, placement),
            send=self._send,
            credentials=credentials,
            join=join,
            deadline=deadline,
        )

    def _bare_coordinator(self, deadline: float) -> Coordinator:
        """One that can only gather failures."""

        def never(_: list[Inventory]) -> Plan:
            raise StartupError("no plan without options")

        return Coordinator(
            self.size, Options(), plan=never, send=self._send, credentials=dict, join=None, deadline=deadline
        )

    def _say_hello(self, inventory: Inventory | None, failure: DaskGpuMpiError | None) -> None:
        options = self._options
        shape: tuple[tuple[str, Any], ...] = ()
        wanted = None
        if isinstance(options, Options):
            wanted = options.interface
            names = (
                "layout",
                "protocol",
                "scheduler",
                "scheduler_rank",
                "client_rank",
                "cpu_workers",
                "name",
                "nthreads",
            )
            shape = tuple((name, getattr(options, name)) for name in names)
        hello = Hello(
            self.host,
            inventory,
            list_interfaces(),
            wanted,
            shape,
            None if failure is None else Failure.of(failure),
        )
        self._send(COORDINATOR, "hello", hello)

    def _until_up(self, deadline: float) -> Go:
        limit = deadline + COORDINATOR_GRACE
        while self.go is None:
            self.pump(BRISK)
            coordinator = self.coordinator
            if coordinator is not None:
                coordinator.tick(time.monotonic())
                if isinstance(coordinator.outcome, Go):
                    self.go = coordinator.outcome
                elif coordinator.outcome is not None:
                    self._report_and_raise(coordinator.outcome, coordinator.failure)
            elif time.monotonic() > limit:
                raise StartupError(
                    f"rank {self.rank} on {self.host} heard nothing from rank 0 until the start-up deadline"
                )
        assert self._agent is not None  # without one there is no cluster
        if self._start is not None and not self._start.workers and not self._is_scheduler_rank:
            self.drop_agent(timeout=1.0)  # nothing to do here: give its memory back
        elif self._is_scheduler_rank:
            self._agent.send("dashboard")
        return self.go

    def _report_and_raise(self, error: DaskGpuMpiError, failure: Failure) -> None:
        """On the coordinator: print before anybody else exits, since a launcher ends all ranks when one fails."""
        print(f"dask_gpu_mpi: error: {error}", file=sys.stderr, flush=True)
        error.reported = True
        assert self._mailbox is not None
        self._mailbox.send_all("fail", failure)
        self._mailbox.flush(2.0)
        raise error

    # -- messages ---------------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, kind: str, payload: Any) -> None:
        assert self._mailbox is not None  # nobody talks before the ranks have joined
        self._mailbox.send(rank, kind, payload)

    def pump(self, timeout: float) -> None:
        """Handle what has come from other ranks and from the agent; waits at most `timeout` seconds."""
        with self._pump_lock:
            if self._mailbox is not None:
                for mail in self._mailbox.receive():
                    handled = self.coordinator is not None and self.coordinator.handle(
                        *mail, time.monotonic()
                    )
                    if not handled:
                        self._on_mail(mail.kind, mail.payload)
            if self._agent is None:
                time.sleep(timeout)
                return
            for event in self._agent.events(timeout):
                self._on_event(*event)
            if self._agent is not None and self._agent.lost and not self.stopped:
                text = f"the agent of rank {self.rank} on {self.host} ended ({self._agent.exit_text()})"
                self.drop_agent(timeout=0.5)
                self._on_event("failed" if self.go is None else "agent-lost", text, 1)

    def _on_mail(self, kind: str, payload: Any) -> None:
        if kind == "scheduler":
            self._start_scheduler(*payload)
        elif kind == "start":
            self._start_workers(payload)
        elif kind == "go":
            self.go = payload
        elif kind == "fail":
            raise payload.error(reported=True)
        elif kind == "stop":
            self.stopped = True
        elif kind == "end":
            self.ended = payload
        elif kind == "closed":
            self._closed_ranks.add(payload)
        elif kind == "release":
            self._released = True
        elif kind == "workers-ended":
            self._without_workers.add(payload)
            assert (
                self.go is not None and self.go.plan is not None
            )  # only the coordinator is told, which has the plan
            # A joined cluster was shut down by its owner. In our own, the scheduler's end is what counts.
            if self._target is not None and self._without_workers >= {
                worker.rank for worker in self.go.plan.workers
            }:
                self.finish_all(0, final=not self._has_client)
        elif kind in ("client-done", "cluster-lost"):  # to the coordinator only
            self.finish_all(*payload)

    def _on_event(self, kind: str, *payload: Any) -> None:
        if kind == "scheduler":
            address, port, _ = payload
            self._write_scheduler_file(*payload)
            self._send(COORDINATOR, "address", (address, self._dashboard_link(port)))
        elif kind == "ready":
            self._send(COORDINATOR, "ready", None)
        elif kind == "failed":
            self._send(COORDINATOR, "failed", Failure(*payload))
        elif kind == "closed":
            self._send(COORDINATOR, "closed", self.rank)
        elif kind == "scheduler-ended" and not self.stopped:
            self._scheduler_ended(payload[0])
        elif kind == "agent-lost" and not self.stopped:
            if self._is_scheduler_rank:
                self._scheduler_ended(None, payload[0])
            else:
                print(f"dask_gpu_mpi: {payload[0]}; the rest goes on", file=sys.stderr, flush=True)
        elif kind == "workers-ended" and not self.stopped:
            self._send(COORDINATOR, "workers-ended", self.rank)

    def _start_scheduler(self, listen: str, config: dict[str, Any]) -> None:
        options, agent = self._options, self._agent
        assert (
            isinstance(options, Options) and agent is not None
        )  # the coordinator only sends this when all is well
        agent.send(
            "scheduler",
            SchedulerSettings(
                host=listen,
                port=options.scheduler_port or 0,
                protocol=options.protocol or "tls",
                dashboard=options.dashboard,
                dashboard_address=options.dashboard_address or "127.0.0.1:8787",
                config=config,
            ),
        )
        self._config = config

    def _start_workers(self, start: Start) -> None:
        options, agent = self._options, self._agent
        assert isinstance(options, Options) and agent is not None  # as above
        self._start = start
        self.is_client = start.is_client
        if not start.workers:
            self._send(COORDINATOR, "ready", None)
            return
        settings = WorkerSettings(
            address=start.address,
            protocol=start.protocol,
            host=start.listen,
            interface=options.interface,
            local_directory=agent.scratch or "",
            death_timeout=options.startup_timeout,
            worker_class=options.worker_class,
            worker_options=dict(options.worker_options),
            device_memory=start.device_memory,
        )
        agent.send("workers", (settings, start.workers, start.config))

    # -- the end ----------------------------------------------------------------------------------------------------------------

    @property
    def _is_scheduler_rank(self) -> bool:
        return hasattr(self, "_config")

    def _scheduler_ended(self, code: int | None, text: str = "") -> None:
        """A client called ``shutdown()`` (code 0), or the scheduler was lost."""
        if code == 0:
            self._send(COORDINATOR, "client-done", (0, False))
            return
        why = text or f"the scheduler's process on {self.host} ended (exit code {code})"
        self._send(COORDINATOR, "cluster-lost", (1, False, why))

    def finish_all(self, code: int, final: bool, lost: str | None = None) -> None:
        """On the coordinator: the cluster is over. `final`: the script has ended as well."""
        if lost is not None and not self.stopped:
            self.lost = lost
            print(f"dask_gpu_mpi: error: {lost}: the cluster is lost", file=sys.stderr, flush=True)
        assert self._mailbox is not None
        if not self._has_client or final:
            if self.ended is None:
                self._mailbox.send_all("end", 0)
                self.ended = code
        elif not self.stopped:
            self._mailbox.send_all("stop")
        self.stopped = True

    #: Whether some rank runs a script; set by the session before `serve`.
    _has_client = True

    def serve(self, *, has_client: bool = True) -> int:
        """Wait, politely, until the job ends; what every rank does that does not run the script.

        Returns
        -------
        int
            Exit code of this rank.

        Raises
        ------
        ClusterLostError
            On the coordinator, without a script: the scheduler was lost.
        """
        self._has_client = has_client
        with _Signals() as signals:
            while self.ended is None:
                self.pump(CALM)
                if self.stopped or self.ended is not None:
                    self._wind_down()
                    if self._leave_open:
                        return 0
                if signals.got is not None and self._on_signal(signals.got, has_client):
                    break
                if self._launcher_gone():
                    break
        self.leave()
        if self.lost is not None:
            raise ClusterLostError(self.lost, reported=True)
        if self.ended is not None:
            return self.ended
        return 128 + signals.got[0] if signals.got is not None else 1

    def _wind_down(self) -> None:
        """Close workers everywhere, then the scheduler: a worker that loses its scheduler first has much to say about it."""
        if self._wound_down:
            return
        self._wound_down = True
        agent = self._agent
        if agent is None or not self._is_scheduler_rank:
            self.drop_agent()
            self._send(COORDINATOR, "closed", self.rank)
        else:
            agent.send("close-workers")
        limit = time.monotonic() + self._grace + 1.0
        if self.rank == COORDINATOR:
            while len(self._closed_ranks) < self.size and time.monotonic() < limit:
                self.pump(BRISK)
            scheduler = (
                self.go.plan.scheduler.rank
                if self.go is not None and self.go.plan is not None
                else COORDINATOR
            )
            self._send(scheduler, "release", None)
        if self._is_scheduler_rank:
            while not self._released and self._agent is not None and time.monotonic() < limit:
                self.pump(BRISK)
        self.drop_agent()
        self._remove_scheduler_file()

    def _on_signal(self, got: tuple[int, float], has_client: bool) -> bool:
        """True when this rank is to leave now."""
        if not has_client and self.rank == COORDINATOR:
            self.finish_all(128 + got[0], True)
            return False
        # With a script the client rank gets the signal too, and tells everybody when it is done.
        return time.monotonic() > got[1] + TERM_GRACE

    def _launcher_gone(self) -> bool:
        return self._launched and os.getppid() != self._parent

    def leave(self) -> None:
        """Close the agent, and let the last messages out."""
        self._wind_down()
        if self._mailbox is not None:
            self._mailbox.flush(2.0)

    def client_done(self, timeout: float, *, final: bool) -> None:
        """The script has ended, or closed its session: end the cluster everywhere.

        Parameters
        ----------
        timeout : float
            Seconds to wait for the coordinator, where that is another rank.
        final : bool
            False when the script goes on without the cluster.
        """
        if self.rank == COORDINATOR:
            self.finish_all(0, final)
        else:
            self._send(COORDINATOR, "client-done", (0, final))
            limit = time.monotonic() + timeout
            while self.ended is None and not (self.stopped and not final) and time.monotonic() < limit:
                self.pump(BRISK)
        self.leave()

    def drop_agent(self, timeout: float | None = None) -> None:
        """End this rank's agent, within the shutdown deadline."""
        agent, self._agent = self._agent, None
        if agent is not None:
            if timeout is None:
                timeout = self._options.shutdown_timeout if isinstance(self._options, Options) else 1.0
            agent.close(timeout)

    # -- small things -----------------------------------------------------------------------------------------------------------

    def _dashboard_link(self, port: int | None) -> str | None:
        options = self._options
        assert isinstance(options, Options)
        if not options.dashboard or port is None:
            return None
        host = (options.dashboard_address or "127.0.0.1").rpartition(":")[0] or self.host
        return f"http://{'localhost' if host == '127.0.0.1' else host}:{port}/status"

    def _write_scheduler_file(self, address: str, port: int | None, identity: str) -> None:
        from .joining import write_scheduler_file

        options = self._options
        if isinstance(options, Options) and options.scheduler_file and options.scheduler:
            try:
                write_scheduler_file(options.scheduler_file, address, port, identity, self._config)
                self._file = (options.scheduler_file, identity)
            except InputError as error:
                self._send(COORDINATOR, "failed", Failure.of(error))

    _file: tuple[str, str] | None = None

    def _remove_scheduler_file(self) -> None:
        if self._file is not None:
            from .joining import remove_scheduler_file

            remove_scheduler_file(*self._file)
            self._file = None


class _Signals:
    """Remembers SIGTERM and SIGINT instead of dying of them, while a rank serves."""

    def __init__(self) -> None:
        self.got: tuple[int, float] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: Any) -> None:
        if self.got is None:
            self.got = (number, time.monotonic())


def _world() -> Any:
    return load_mpi().COMM_WORLD


def _may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the agent should import dask_cuda at once: a guess that costs nothing but time where it is wrong."""
    import ctypes

    if options.worker_kind == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    if options.worker_kind == "gpu":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
