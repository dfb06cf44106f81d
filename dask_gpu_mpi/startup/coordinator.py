"""The start on rank 0: gather the registrations, plan, start the scheduler, send each rank its part.

A state machine without MPI, processes or clocks: it is given messages and the time, and sends messages. Its phases (`Phase`):

    REGISTER   STEP, REGISTRATION from every rank
               the plan; the command `plan` leaves here: DONE to all
    SCHEDULER  SCHEDULER to one -> ADDRESS from it
    WORKERS    START to all -> READY from all; over several hosts each rank connects to the scheduler first
    REACH      over several hosts: CONNECT to one rank of each -> REACHED from these
               UP to all

Any FAILED, or the deadline, ends in one report and FAIL to all. The report says at which step a silent rank was.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.base.timeline import Step, Timeline
from dask_gpu_mpi.base.timeouts import GATHER_FAILURES
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem
from dask_gpu_mpi.machine.inventory import absent_inventory
from dask_gpu_mpi.network.reachability import Node, connection_report, peers_by_rank
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.options.convert import is_configured
from dask_gpu_mpi.options.model import OPTIONS, Options, Protocol, Transport
from dask_gpu_mpi.plan import Plan, Start
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.startup.meeting import addresses_of
from dask_gpu_mpi.startup.messages import Cluster, Event, Kind, Registration, SchedulerSettings
from dask_gpu_mpi.startup.transport import (
    choose_transport,
    connection_settings,
    start_delay,
    start_limit,
    workers_per_core,
)

#: Fields of the options that must be the same on all ranks, and the name in messages of one that is not an option itself.
SHARED = {option.name: option.name for option in OPTIONS.values() if option.same} | {
    "worker_ucx": "protocol (UCX between workers)"
}


class Phase(IntEnum):
    """The phases of a start once the ranks have met, in their order."""

    REGISTER = 1
    SCHEDULER = 2
    WORKERS = 3
    REACH = 4


class Coordinator:
    """The start of the job; see the module's text.

    `agent.lead` makes it, passes it all messages (`handle`) and the time (`tick`), and reads `outcome`.

    `hosts`: host of each rank. `options`: of rank 0. `timeline`: of this process. `send`: ``send(rank, kind, payload)``.
    `deadline`: ``time.monotonic()`` of the start-up deadline. `plan_only`: the plan is the outcome, not the cluster.
    `credentials`: Dask configuration that carries them. `target`: the cluster to attach to; None: this job starts one.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        options: Options,
        timeline: Timeline,
        *,
        send: Callable[[int, str, Any], None],
        deadline: float,
        plan_only: bool = False,
        credentials: dict[str, Any],
        target: Target | None = None,
    ) -> None:
        self.hosts = hosts
        self.size = len(hosts)
        if target is not None:  # other jobs' workers, whose names are unknown, are there as well
            options = replace(options, name=f"{options.name or 'join'}-{secrets.token_hex(4)}")
        self._options = options
        self._timeline = timeline
        self._plan_only = plan_only
        self._credentials = credentials
        self._target = target
        self._send = send
        #: The end of the start, once it is known: a `Cluster`, the plan of the command `plan`, or the error.
        self.outcome: object = None
        self.phase = Phase.REGISTER
        #: ``time.monotonic()`` at which the start ends.
        self.deadline = deadline
        #: Seconds of the start after the plan, by the options or the number of workers.
        self._limit = 0.0
        #: The step of each rank, as last reported.
        self.steps: dict[int, str] = {}
        #: The ranks that take part: all, but for those without which the cluster starts.
        self._ranks: Sequence[int] = range(self.size)
        #: The failures of ranks, and when the first came.
        self._failures: dict[int, Failure] = {}
        self._failed_at: float | None = None
        # REGISTER
        self._registrations: dict[int, Registration] = {}
        #: Whether some rank has a script to run.
        self.has_client = True
        #: Made when all have registered; so are the next three: where the processes of each rank listen, how workers exchange
        #: data, and Dask's configuration of the cluster.
        self.plan: Plan | None = None
        self._listen: dict[int, str | None] = {}
        self._transport = Transport()
        self._config: dict[str, Any] = {}
        # SCHEDULER
        self._cluster: Cluster | None = None
        # WORKERS
        self._starts: dict[int, Start] = {}
        #: By rank that is ready: the steps of its timeline (none, unless the user wants a report), and the address of a worker.
        self._ready: dict[int, tuple[list[Step], str]] = {}
        # REACH
        #: The nodes that connect to each other, by the rank that does it; those that have not done so yet.
        self._nodes: dict[int, Node] = {}
        self._connecting: set[int] = set()
        #: By rank, and by error: the hosts that it has not reached.
        self._lost: dict[int, dict[str, list[str]]] = {}

    def handle(self, event: Event, now: float) -> bool:
        """Handle one message; False when it is not for the coordinator."""
        source, kind, payload = event
        if source not in self._ranks:  # it was left out, and is late
            if kind == Kind.ENTERED:
                self._send(source, Kind.DONE, 1)
            return True
        match kind:
            case Kind.STEP:
                self.steps[source] = payload
            case Kind.REGISTRATION:
                self._registrations[source] = payload
                if len(self._registrations) == self.size and not self._failures:
                    self._make_plan(now)
            case Kind.ADDRESS:
                self._start_workers(*payload)
            case Kind.READY:
                self._ready[source] = payload
                if len(self._ready) == len(self._ranks) and self._goes_on:
                    self._connect_nodes()
            case Kind.REACHED:
                self._connecting.discard(source)
                if payload:
                    self._lost[source] = payload
                if not self._connecting and self._goes_on:
                    self._judge_connections()
            case Kind.FAILED:
                self._failures.setdefault(source, payload)
                if self._failed_at is None:
                    self._failed_at = now
            case _:
                return False
        return True

    @property
    def _goes_on(self) -> bool:
        """Whether the start has neither ended nor failed."""
        return self.outcome is None and not self._failures

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that the present phase waits for."""
        if self.phase is Phase.REACH:
            return sorted(self._connecting)
        if self.phase is Phase.SCHEDULER:
            return [self._made_plan.scheduler.rank]
        silent = [rank for rank in range(self.size) if rank not in self._registrations]
        return silent or [rank for rank in self._ranks if rank not in self._ready]

    def progress(self) -> tuple[int, int | None, list[str]]:
        """Workers that are ready, workers planned (None before the plan), and the hosts of the ranks that are awaited."""
        hosts = [self.hosts[rank] for rank in self.waiting_for]
        if self.plan is None:
            return 0, None, hosts
        ready = sum(worker.rank in self._ready for worker in self.plan.workers)
        return ready, len(self.plan.workers), hosts

    def _begin(self, phase: Phase, ranks: Iterable[int], step: str) -> None:
        """Begin a phase, in which these ranks do something."""
        self.phase = phase
        self.steps.update(dict.fromkeys(ranks, step))

    # -- REGISTER: the plan -------------------------------------------------------------------------------------

    @property
    def _made_plan(self) -> Plan:
        """The plan, in the phases after the first."""
        assert self.plan is not None
        return self.plan

    def _make_plan(self, now: float) -> None:
        found = [self._registrations[rank] for rank in range(self.size)]
        self.has_client = any(each.has_client for each in found)
        try:
            with self._timeline.step("plan"):
                plan = plan_of(found, self._options)
            if self._plan_only:  # it ends here, without a cluster
                for rank in range(1, self.size):
                    self._send(rank, Kind.DONE, 0)
                self.plan = self.outcome = plan
                return
            self._listen = self._choose_addresses(found)
            self._transport = self._choose_transport(found, plan)
        except DaskGpuMpiError as error:
            self._end_with(Failure.of(error))
            return
        if self._transport.warning:
            plan = replace(plan, warnings=(*plan.warnings, self._transport.warning))
        self.plan = plan
        per_core = workers_per_core(plan)
        wanted = connection_settings(len(plan.workers), per_core)
        settings = {key: value for key, value in wanted.items() if not is_configured(key)}
        if "startup_timeout" not in self._options.explicit:  # the user has set no deadline
            self._limit = max(self._limit, start_limit(len(plan.workers), per_core))
            self.deadline = max(self.deadline, now + self._limit)
        if (target := self._target) is not None:
            self._config = target.config | settings
            self._start_workers(target.address, None)
            return
        self._config = self._credentials | settings
        self._start_scheduler()

    def _choose_addresses(self, found: Sequence[Registration]) -> dict[int, str | None]:
        """The addresses at which each rank's workers, and the scheduler, are to listen; None: where the scheduler is reached.

        Raises InputError: there is no network that all share, or not the chosen one.
        """
        if self._target is not None and not any(each.wanted for each in found):
            return dict.fromkeys(range(self.size))
        return {**addresses_of(found)}

    def _choose_transport(self, found: Sequence[Registration], plan: Plan) -> Transport:
        target = self._target
        if target is not None and target.protocol is not Protocol.TLS:
            return Transport()
        abilities = {rank: each.ucx for rank, each in enumerate(found)}
        options = self._options
        return choose_transport(
            options.worker_ucx, plan, abilities, attaches=target is not None, sealed=options.data_encryption
        )

    # -- SCHEDULER ----------------------------------------------------------------------------------------------

    def _start_scheduler(self) -> None:
        plan = self._made_plan
        role = plan.scheduler
        self._begin(Phase.SCHEDULER, [role.rank], "starting the scheduler")
        settings = SchedulerSettings(
            self._listen[role.rank],
            self._config,
            token="",  # its rank makes it
            device=plan.scheduler_device,
            plan=plan,
            has_script=self.has_client,
        )
        self._send(role.rank, Kind.SCHEDULER, settings)

    # -- WORKERS ------------------------------------------------------------------------------------------------

    def _start_workers(self, address: str, dashboard: str | None) -> None:
        """The scheduler is up: every rank may start its workers."""
        self._cluster = Cluster(address, dashboard)
        self._begin(Phase.WORKERS, self._ranks, "starting its workers")
        plan, target = self._made_plan, self._target
        place = self._place_of_scheduler()
        with_gpus = {rank for host in plan.hosts if host.gpus for rank in host.ranks}
        before = 0
        for rank in self._ranks:
            workers = plan.for_rank(rank)
            start = Start(
                address,
                protocol=(target and target.protocol) or self._options.protocol,
                listen=self._listen[rank],
                workers=workers,
                config=self._config,
                beside_gpus=rank in with_gpus,
                is_client=rank == plan.client.rank,
                delay=start_delay(before, len(plan.workers)),
                limit=self._limit,
                transport=self._transport,
                scheduler=place,
            )
            before += len(workers)
            self._starts[rank] = start
            self._send(rank, Kind.START, start)

    def _place_of_scheduler(self) -> str:
        """Its rank and host, if ranks are to connect to it before they start workers; empty: they are not.

        On its own node there is nothing to find out.
        """
        if self._target is not None:
            return "of another job"
        role = self._made_plan.scheduler
        machines = {each.machine for each in self._registrations.values()}
        return f"rank {role.rank} on {role.host}" if len(machines) > 1 else ""

    def start_of(self, rank: int, *, without: Collection[str | int]) -> Start | None:
        """The part of a rank whose agent was lost, without workers that have ended for good; None: it has none."""
        if (start := self._starts.get(rank)) is None:
            return None
        workers = tuple(each for each in start.workers if each.name not in without)
        return replace(start, workers=workers, delay=0.0, scheduler="")

    # -- REACH --------------------------------------------------------------------------------------------------

    def _connect_nodes(self) -> None:
        """All workers are there: let nodes connect to each other."""
        plan = self._made_plan
        self._nodes.clear()
        addresses = {rank: address for rank, (_, address) in self._ready.items() if address}
        for host in plan.hosts:
            # a node has workers, or the scheduler, which connects to workers as well
            rank = next((rank for rank in host.ranks if rank in addresses), None)
            if rank is None and plan.scheduler.rank in host.ranks:
                rank = plan.scheduler.rank
            if rank is not None:
                self._nodes[rank] = Node(host.host, rank, addresses.get(rank, ""))
        peers = {rank: others for rank, others in peers_by_rank([*self._nodes.values()]).items() if others}
        self._connecting = set(peers)
        self._begin(Phase.REACH, peers, "connecting to workers of other nodes")
        for rank, others in peers.items():
            self._send(rank, Kind.CONNECT, others)
        if not peers:
            self._judge_connections()

    def _judge_connections(self) -> None:
        """The cluster is up, unless a node has not reached another."""
        if not self._lost:
            self._up()
            return
        lost = {self._nodes[rank].host: hosts for rank, hosts in sorted(self._lost.items())}
        problem = Problem(
            f"no connection between nodes: {connection_report(lost)} (expected: every node reaches all others, since their "
            "workers exchange data)",
            fix="open the ports between these nodes in the firewall, choose another network with interface (--interface), or "
            "leave a node out of the job",
            what="node pairs",
        )
        self._end_with(Failure(problem, InputError.exit_code))

    def _up(self) -> None:
        plan = self._made_plan
        assert self._cluster is not None  # ranks are ready after START
        steps = {rank: steps for rank, (steps, _) in self._ready.items() if steps}
        full = replace(
            self._cluster,
            plan=plan,
            transport=str(self._transport.line),
            config=self._config,
            absent=tuple(sorted(self._absent)),
            hosts=dict(self.hosts) if steps else {},
            steps=steps,
        )
        part = Cluster(self._cluster.address, None)
        for rank in self._ranks[1:]:
            self._send(rank, Kind.UP, full if rank == plan.client.rank else part)
        self.outcome = full

    # -- failures, and ranks that are late ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End the start when it is time to: some time after a failure, or at the deadline."""
        if self.outcome is not None:
            return
        if self._failed_at is not None:
            if self._failures.keys() >= set(self.waiting_for) or now > self._failed_at + GATHER_FAILURES:
                self._end_with_report()
        elif now > self.deadline and not self._starts_without(self.waiting_for, now):
            for rank in self.waiting_for:
                self._failures[rank] = Failure(self._silence_of(rank))
            self._end_with_report(fatal=True)

    def _silence_of(self, rank: int) -> Problem:
        """The problem of a rank that is late."""
        text = "not ready" if rank in self._registrations else "no response"
        last = f"; last step: {self.steps[rank]}" if rank in self.steps else ""
        return Problem(
            f"{text} before the start-up timeout (startup_timeout){last}",
            fix="inspect that node (a rank that is stopped, no memory left, a slow file system?), or set a longer "
            "startup_timeout (--startup-timeout)",
            what="ranks",
            ranks=(rank,),
        )

    def _end_with_report(self, *, fatal: bool = False) -> None:
        self._end_with(one_report(self._failures, self.hosts, self.size), fatal=fatal)

    def _end_with(self, failure: Failure, *, fatal: bool = False) -> None:
        self.outcome = failure.error(reported=False)
        self.outcome.fatal = fatal

    def _starts_without(self, missing: Collection[int], now: float) -> bool:
        """Start without these ranks, which are missing at the deadline, if so many may be; returns whether it does.

        A rank whose workers are late stays in the plan, and they join when they are there.
        """
        if self._plan_only or 0 in missing:
            return False
        if len(self._absent.union(missing)) > self._options.tolerate_lost_ranks:
            return False
        if self.phase is Phase.REGISTER:
            self._limit = self._options.startup_timeout
            self.deadline = now + self._limit
            self._leave_out(missing)
            self._make_plan(now)
            return True
        if self.phase < Phase.WORKERS:
            return False
        late = Problem(
            f"{ranks_text(missing)} not ready before the start-up timeout (startup_timeout); starting without "
            "(tolerate_lost_ranks)",
            fix="inspect these nodes, or set a longer startup_timeout (--startup-timeout)",
            ranks=tuple(missing),
        )
        plan = self._made_plan
        self.plan = replace(plan, warnings=(*plan.warnings, late))
        self._judge_connections()
        return True

    def _leave_out(self, missing: Collection[int]) -> None:
        """Go on without these ranks: they get no workers, and leave when they read it."""
        first = self._registrations[0]
        boot_ids = {each.host: each.inventory.boot_id for each in self._registrations.values()}
        for rank in missing:
            self._send(rank, Kind.DONE, 1)
            host = self.hosts[rank]
            inventory = absent_inventory(
                rank, self.size, host, boot_ids.get(host, ""), self._options.startup_timeout
            )
            self._registrations[rank] = replace(first, host=host, inventory=inventory)
        self._ranks = [rank for rank in self._ranks if rank not in missing]

    @property
    def _absent(self) -> set[int]:
        """The ranks that were left out."""
        return set(range(self.size)).difference(self._ranks)


def plan_of(found: Sequence[Registration], options: Options) -> Plan:
    """The plan from the registrations of all ranks, in order, which have inventories.

    Raises InputError: the ranks do not agree, or no plan fits the options.
    """
    check_agreement(found)
    inventories = [each.inventory for each in found]
    has_client = any(each.has_client for each in found)
    plan = make_plan(inventories, options, has_client=has_client)
    check_client(found, plan.client.rank)
    return plan


def shared_options(options: Options) -> tuple[tuple[str, object], ...]:
    """The options that must be the same on all ranks, as (name, value)."""
    return tuple((name, getattr(options, field)) for field, name in SHARED.items())


def check_agreement(registrations: Sequence[Registration]) -> None:
    """Whether all ranks, in order, have the same options.

    Raises InputError: they have not.
    """
    first = registrations[0]
    for rank, other in enumerate(registrations):
        for (name, value), (_, found) in zip(first.shared_options, other.shared_options, strict=True):
            if value != found:
                raise InputError(
                    f"option {name} is {value!r} on rank 0 ({first.host}) and {found!r} on rank {rank} ({other.host})",
                    expected="the same on all ranks",
                )


def check_client(registrations: Sequence[Registration], client: int) -> None:
    """Whether the client rank has something to run, where any rank has.

    Raises InputError: only others have.
    """
    having = [rank for rank, found in enumerate(registrations) if found.has_client]
    if having and client not in having:
        raise InputError(
            f"rank {client} ({registrations[client].host}) is the client, but only {ranks_text(having)} got a script or "
            "function to run",
            expected="the same call on all ranks",
            fix="pass it on all ranks, or set client_rank (--client-rank)",
        )
