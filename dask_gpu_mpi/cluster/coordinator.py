"""What rank 0 does while the cluster comes up: hear every rank, plan, start the scheduler, send everybody their part.

A state machine without MPI, processes or clocks of its own: it is given messages and the time, and says what to send.

    HELLO from every rank -> plan -> SCHEDULER to one -> ADDRESS from it -> START to all -> READY from all -> GO to all

Over several hosts, between the plan and the scheduler: PROBE to one -> PROBING from it -> PROVE to all -> REACHED from all.

Any FAILED, or the deadline, ends in one report and FAIL to all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, Tokens
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.plan.planner import Plan, WorkerPlan
from dask_gpu_mpi.plan.scaling import connection_settings, start_delay, start_limit, workers_per_core

from .events import Event

__all__ = ["Coordinator", "Go", "Hello", "Start"]

#: Seconds to wait for the reports of other ranks once one has failed: most failures are everybody's.
GATHER_FAILURES = 1.0
#: The same while ranks connect to the scheduler's host: some are told at once that there is no way, others wait in vain.
GATHER_PROOFS = 2 * CONNECT_TIMEOUT + 1.0


@dataclass(frozen=True)
class Hello:
    """What a rank says first: what it sees, or why it can't.

    Attributes
    ----------
    host : str
        Where it runs.
    inventory : Inventory or None
        None with a failure.
    interfaces : tuple of Interface
        The networks of its host.
    wanted_interface : str or None
        What it was asked to use.
    shape : tuple
        Options that must be the same on all ranks, as (name, value).
    failure : Failure or None
        Why this rank can't take part.
    has_client : bool
        Whether this rank has a script to run, should it be the client's.
    """

    host: str
    inventory: Inventory | None
    interfaces: tuple[Interface, ...]
    wanted_interface: str | None
    shape: tuple[tuple[str, Any], ...]
    failure: Failure | None = None
    has_client: bool = True


@dataclass(frozen=True)
class Start:
    """A rank's part of the plan, and how to reach the scheduler.

    Attributes
    ----------
    address : str
        The scheduler's.
    protocol : str
        ``"tls"``, ``"tcp"`` or ``"ucx"``.
    listen : str or None
        Address for this rank's workers; None = the one that leads to the scheduler.
    workers : tuple of WorkerPlan
        This rank's.
    device_memory : dict
        Bytes, by UUID, of all devices of its host.
    config : dict
        Dask configuration with the credentials.
    is_client : bool
        Whether the script runs here.
    delay : float
        Seconds for which it holds back its workers, so that not all connect at once.
    limit : float
        Seconds that all workers may take from now, where the start-up deadline grows with their number; 0: it does not.
    """

    address: str
    protocol: str
    listen: str | None
    workers: tuple[WorkerPlan, ...]
    device_memory: dict[str, int]
    config: dict[str, Any] = field(repr=False)
    is_client: bool = False
    delay: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Go:
    """The cluster is up.

    Attributes
    ----------
    address : str
        The scheduler's.
    dashboard : str or None
        Link to the dashboard.
    plan : Plan or None
        For the client rank.
    config : dict
        Dask configuration with the credentials, for the client rank.
    """

    address: str
    dashboard: str | None
    plan: Plan | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False)


class Coordinator:
    """See the module's text.

    Parameters
    ----------
    size : int
        Number of ranks.
    protocol : str
        Of the scheduler that this job starts.
    plan : callable
        From the inventories, and whether any rank has a script, to the plan.
    send : callable
        ``send(rank, kind, payload)``.
    credentials : callable
        Makes the Dask configuration that carries the credentials; called once.
    join : tuple or None
        ``(address, protocol, config)`` of a cluster that is there already.
    deadline : float
        ``time.monotonic()`` of the start-up deadline.
    hosts : mapping, optional
        Host of each rank, for reports about those who have not even said HELLO.
    configured : collection of str
        Keys of `crowd` that the user has configured.
    patient : bool
        The deadline is nobody's wish, and may grow with the number of workers.
    """

    def __init__(
        self,
        size: int,
        *,
        protocol: str,
        plan: Callable[[list[Inventory], bool], Plan],
        send: Callable[[int, str, Any], None],
        credentials: Callable[[], dict[str, Any]],
        join: tuple[str, str, dict[str, Any]] | None,
        deadline: float,
        hosts: Mapping[int, str] | None = None,
        configured: Collection[str] = (),
        patient: bool = False,
    ) -> None:
        self.size = size
        self._hosts = dict(hosts or {})
        self._protocol = protocol
        self.plan: Plan | None = None
        self.outcome: Go | DaskGpuMpiError | None = None
        self._make_plan = plan
        self._send = send
        self._credentials = credentials
        self._join = join
        self._deadline = deadline
        self._configured = configured
        self._patient = patient
        self._limit = 0.0
        self._hellos: dict[int, Hello] = {}
        #: By rank: what it told of its timeline when it was ready (nothing, unless the user wants it).
        self.steps: dict[int, list[Step]] = {}
        self._failures: dict[int, Failure] = {}
        self._failed_at: float | None = None
        self._ready: set[int] = set()
        self._tokens: Tokens | None = None
        self._proving = False
        self._reached: set[int] = set()
        self._config: dict[str, Any] = {}
        self._listen: dict[int, str | None] = {}
        self._go: Go | None = None

    def handle(self, event: Event, now: float) -> bool:
        """Take one message; False when it is not for the coordinator."""
        source, kind, payload = event
        if source is None:
            return False
        if kind == "hello":
            self._hellos[source] = payload
            if payload.failure is not None:
                self._fail(source, payload.failure, now)
            elif len(self._hellos) == self.size and not self._failures:
                self._all_here(now)
        elif kind == "address":
            self._scheduler_is_up(*payload)
        elif kind == "probing":
            assert self.plan is not None  # it was asked for after the plan
            role = self.plan.scheduler
            if payload:
                self._prove(payload, f"rank {role.rank} on {role.host}", self._tokens)
            else:
                self._start_scheduler()  # which says better why nobody can listen there
        elif kind == "reached":
            self._reached.add(source)
            if len(self._reached) == self.size and not self._failures:
                self._all_reach()
        elif kind == "ready":
            self._ready.add(source)
            self.steps[source] = payload or []
            if len(self._ready) == self.size and self.outcome is None and not self._failures:
                self._all_ready()
        elif kind == "failed":
            self._fail(source, payload, now)
        else:
            return False
        return True

    def tick(self, now: float) -> None:
        """Give up when it is time to."""
        if self.outcome is not None:
            return
        if self._failed_at is not None:
            heard = len(self._failures) + len(self._reached if self._proving else ()) == self.size
            if heard or now > self._failed_at + (GATHER_PROOFS if self._proving else GATHER_FAILURES):
                self._give_up()
        elif now > self._deadline:
            silent = [rank for rank in range(self.size) if rank not in self._hellos]
            text = "has not answered" if silent else "has not started its workers"
            for rank in silent or self.waiting_for:
                self._failures[rank] = Failure(
                    f"{text} within the start-up deadline (startup_timeout)", 1, of_a_rank=True
                )
            self._give_up(fatal=True)

    def progress(self) -> tuple[int, int | None, list[str]]:
        """Workers that are ready, workers planned (None before the plan), and the hosts of the ranks that are awaited."""
        ready = planned = None
        if self.plan is not None:
            planned = len(self.plan.workers)
            ready = sum(worker.rank in self._ready for worker in self.plan.workers)
        silent = [rank for rank in range(self.size) if rank not in self._hellos]
        hosts = [
            self._hellos[rank].host if rank in self._hellos else self._hosts.get(rank, "")
            for rank in silent or self.waiting_for
        ]
        return ready or 0, planned, hosts

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each rank, as far as it is known."""
        return {**self._hosts, **{rank: hello.host for rank, hello in self._hellos.items()}}

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that are not ready yet."""
        return [rank for rank in range(self.size) if rank not in self._ready]

    def _fail(self, rank: int, failure: Failure, now: float) -> None:
        self._failures.setdefault(rank, failure)
        if self._failed_at is None:
            self._failed_at = now

    def _give_up(self, *, fatal: bool = False) -> None:
        self._end_with(one_report(self._failures, self.hosts, self.size), fatal=fatal)

    def _end_with(self, failure: Failure, *, fatal: bool = False) -> None:
        self.outcome = failure.error(reported=False)
        self.outcome.fatal = fatal

    def _all_here(self, now: float) -> None:
        hellos = [self._hellos[rank] for rank in range(self.size)]
        try:
            self._same_options(hellos)
            inventories = [hello.inventory for hello in hellos if hello.inventory is not None]
            self.plan = self._make_plan(inventories, any(hello.has_client for hello in hellos))
            self._has_what_to_run(hellos, self.plan.client.rank)
            hosts = [inventory.host + inventory.boot_id for inventory in inventories]
            wanted = [hello.wanted_interface for hello in hellos]
            names = [hello.host for hello in hellos]
            if self._join is not None and not any(wanted):
                self._listen = dict.fromkeys(range(self.size))
            else:
                same = names if len(set(hosts)) == len(set(names)) else hosts
                interfaces = {rank: hello.interfaces for rank, hello in enumerate(hellos)}
                self._listen = dict(choose_addresses(same, interfaces, wanted)[1])
        except DaskGpuMpiError as error:
            self._end_with(Failure.of(error))
            return
        workers = len(self.plan.workers)
        crowd = workers_per_core(self.plan.workers)
        settings = connection_settings(workers, crowd, self._configured)
        if self._patient:
            self._limit = start_limit(workers, crowd)
            self._deadline = max(self._deadline, now + self._limit)
        if self._join is not None:
            address, _, theirs = self._join
            self._config = theirs | settings
            if (known := Protocol.of(address)) is not None and known.allows_plain_probe:
                self._prove(address.partition("://")[2], "of another job", None)
            else:  # a listener with TLS or UCX would complain of whoever hangs up
                self._scheduler_is_up(address, None)
            return
        self._config = self._credentials() | settings
        role = self.plan.scheduler
        if len(set(hosts)) > 1:
            self._tokens = Tokens()
            self._send(role.rank, "probe", (self._listen[role.rank], self._tokens))
        else:
            self._start_scheduler()

    def _prove(self, target: str, where: str, tokens: Tokens | None) -> None:
        """Have every rank connect to where the scheduler is, or will be."""
        self._proving = True
        for rank in range(self.size):
            self._send(rank, "prove", (target, where, tokens))

    def _all_reach(self) -> None:
        self._proving = False
        if self._join is not None:
            self._scheduler_is_up(self._join[0], None)
        else:
            self._start_scheduler()

    def _start_scheduler(self) -> None:
        assert self.plan is not None  # it says where
        role = self.plan.scheduler
        here = next(host.gpus for host in self.plan.hosts if host.host == role.host)
        device = here[0].uuid if here and self._protocol == Protocol.UCX else ""
        self._send(role.rank, "scheduler", (self._listen[role.rank], self._config, device))

    def _same_options(self, hellos: list[Hello]) -> None:
        first = hellos[0].shape
        for rank, hello in enumerate(hellos):
            for (name, value), (_, other) in zip(first, hello.shape, strict=True):
                if value != other:
                    raise InputError(
                        f"option {name} is {value!r} on rank 0 ({hellos[0].host}) and {other!r} on rank {rank} ({hello.host}): "
                        "it must be the same on all ranks"
                    )

    def _has_what_to_run(self, hellos: list[Hello], client: int) -> None:
        having = [rank for rank, hello in enumerate(hellos) if hello.has_client]
        if having and client not in having:
            raise InputError(
                f"rank {client} ({hellos[client].host}) is the client, but only {ranks_text(having)} got a script or function to "
                "run (expected the same call on all ranks). Fix: pass it on all ranks, or set client_rank (--client-rank)"
            )

    def _scheduler_is_up(self, address: str, dashboard: str | None) -> None:
        assert self.plan is not None  # the scheduler is started after the plan is made
        self._go = Go(address, dashboard)
        memory = {host.host: {gpu.uuid: gpu.memory for gpu in host.gpus} for host in self.plan.hosts}
        host_of = {rank: host.host for host in self.plan.hosts for rank in host.ranks}
        mine: dict[int, list[WorkerPlan]] = {}
        for worker in self.plan.workers:
            mine.setdefault(worker.rank, []).append(worker)
        protocol = self._join[1] if self._join is not None else self._protocol
        before, total = 0, len(self.plan.workers)
        for rank in range(self.size):
            delay = start_delay(before, total)
            before += len(mine.get(rank, ()))
            self._send(
                rank,
                "start",
                Start(
                    address,
                    protocol,
                    self._listen[rank],
                    tuple(mine.get(rank, ())),
                    memory[host_of[rank]],
                    self._config,
                    rank == self.plan.client.rank,
                    delay,
                    self._limit,
                ),
            )

    def _all_ready(self) -> None:
        assert self.plan is not None  # ranks are ready after START
        assert self._go is not None  # as above
        full = Go(self._go.address, self._go.dashboard, self.plan, self._config)
        for rank in range(1, self.size):
            self._send(rank, "go", full if rank == self.plan.client.rank else self._go)
        self.outcome = full
