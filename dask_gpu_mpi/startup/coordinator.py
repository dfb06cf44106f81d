"""What rank 0 does while the cluster starts: gather the registrations, plan, start the scheduler, send each rank its part.

A state machine without MPI, processes or clocks of its own: it is given messages and the time, and sends messages.

    REGISTRATION from every rank -> plan -> SCHEDULER to one -> ADDRESS from it -> START to all -> READY from all
        -> CLUSTER_UP to all

Over several hosts, between the plan and the scheduler, the reachability test:

    LISTEN to one rank of each -> LISTENING from these -> CONNECT to all -> REACHED from all

Any FAILED, or the deadline, ends in one report and FAIL to all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.diagnostics.job_facts import facts_of
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.interfaces import choose_addresses
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.options.protocols import Protocol, Transport, WorkerUcx
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.scaling import connection_settings, start_delay, start_limit, workers_per_core

from .channels import Event
from .messages import Cluster, Kind, Registration, Start
from .reachability import ReachabilityTest
from .registrations import FailureCoordinator, check_agreement, check_client
from .transport import choose_transport, probing_workers

__all__ = ["Coordinator", "Job"]

#: Seconds to wait for the reports of other ranks once one has failed while ranks connect to the scheduler's host: some learn
#: at once that there is no route, others wait in vain.
GATHER_UNREACHED = 2 * CONNECT_TIMEOUT + 1.0


@dataclass(frozen=True)
class Job:
    """What the coordinator needs to know of the job."""

    #: Of the scheduler that this job starts.
    protocol: str
    #: From the inventories, and whether any rank has a script, to the plan.
    plan: Callable[[list[Inventory], bool, Mapping[int, Mapping[str, Any]]], Plan]
    #: Makes the Dask configuration that carries the credentials; called once.
    credentials: Callable[[], dict[str, Any]]
    #: The cluster to attach to; None: this job starts one.
    target: Target | None = None
    #: Keys of `plan.scaling` that the user has configured.
    configured: Collection[str] = ()
    #: The user has set no deadline: it may grow with the number of workers.
    patient: bool = False
    #: What the user wants workers to send each other over UCX.
    ucx: WorkerUcx = WorkerUcx.OFF


class Coordinator(FailureCoordinator):
    """See the module's text.

    Parameters
    ----------
    size : int
        Number of ranks.
    job : Job
        What this is to be.
    send : callable
        ``send(rank, kind, payload)``.
    deadline, hosts
        As `FailureCoordinator`.
    """

    def __init__(
        self,
        size: int,
        job: Job,
        *,
        send: Callable[[int, str, Any], None],
        deadline: float,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(size, deadline=deadline, hosts=hosts)
        self.plan: Plan | None = None
        #: By rank: the steps of its timeline until it was ready (none, unless the user wants a report).
        self.steps: dict[int, list[Step]] = {}
        self._job = job
        self._send = send
        self._test = ReachabilityTest(size, send)
        self._limit = 0.0
        self._ready: set[int] = set()
        self._config: dict[str, Any] = {}
        self._listen: dict[int, str | None] = {}
        self._transport = Transport()
        self._cluster: Cluster | None = None

    def handle(self, event: Event, now: float) -> bool:
        """Take one message; False when it is not for the coordinator."""
        if super().handle(event, now):
            if event.kind == Kind.REGISTRATION and self._all_registered and not self._failures:
                self._make_plan(now)
            return True
        source, kind, payload = event
        if source is None:
            return False
        if kind == Kind.LISTENING:
            if self._test.on_listening(source, payload) and not self._test.connect():
                self._start_scheduler()  # whose error says better why nobody can listen there
        elif kind == Kind.REACHED:
            if self._test.on_reached(source, payload) and not self._failures:
                self._all_reached()
        elif kind == Kind.ADDRESS:
            self._on_address(*payload)
        elif kind == Kind.READY:
            self._ready.add(source)
            self.steps[source] = payload or []
            if len(self._ready) == self.size and self.outcome is None and not self._failures:
                self._all_ready()
        else:
            return False
        return True

    def progress(self) -> tuple[int, int | None, list[str]]:
        """Workers that are ready, workers planned (None before the plan), and the hosts of the ranks that are awaited."""
        _, _, hosts = super().progress()
        if self.plan is None:
            return 0, None, hosts
        ready = sum(worker.rank in self._ready for worker in self.plan.workers)
        return ready, len(self.plan.workers), hosts

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not registered; once all have, those that are not ready yet."""
        return super().waiting_for or [rank for rank in range(self.size) if rank not in self._ready]

    def _others_reported(self) -> int:
        return len(self._test.reached) if self._test.under_way else 0

    def _report_timeout(self) -> float:
        return GATHER_UNREACHED if self._test.under_way else super()._report_timeout()

    # -- the plan -----------------------------------------------------------------------------------------------

    def _make_plan(self, now: float) -> None:
        found = [self._registrations[rank] for rank in range(self.size)]
        inventories = [each.inventory for each in found if each.inventory is not None]
        machines = [inventory.host + inventory.boot_id for inventory in inventories]
        try:
            check_agreement(found)
            sizes = {rank: each.device_options for rank, each in enumerate(found)}
            plan = self._job.plan(inventories, any(each.has_client for each in found), sizes)
            check_client(found, plan.client.rank)
            self._listen = self._choose_addresses(found, machines)
            self._transport = self._choose_transport(found, plan)
        except DaskGpuMpiError as error:
            self._end_with(Failure.of(error))
            return
        if self._transport.warning:
            plan = replace(plan, warnings=(*plan.warnings, self._transport.warning))
        self.plan = plan
        per_core = workers_per_core(plan)
        settings = connection_settings(len(plan.workers), per_core, self._job.configured)
        if self._job.patient:
            self._limit = start_limit(len(plan.workers), per_core)
            self._deadline = max(self._deadline, now + self._limit)
        target = self._job.target
        if target is not None:
            self._config = target.config | settings
            if (known := Protocol.of(target.address)) is not None and known.allows_plain_probe:
                self._test.connect_to_running(target.address.partition("://")[2])
            else:  # a listener with TLS or UCX would complain of whoever hangs up
                self._on_address(target.address, None)
            return
        self._config = self._job.credentials() | settings
        if len(set(machines)) > 1:
            self._test.listen(plan, self._listen)
        else:
            self._start_scheduler()

    def _choose_transport(self, found: Sequence[Registration], plan: Plan) -> Transport:
        target = self._job.target
        if target is not None and Protocol.of(target.address) is not Protocol.TLS:
            return Transport()
        abilities = {rank: each.ucx for rank, each in enumerate(found)}
        return choose_transport(self._job.ucx, plan, abilities, attaches=target is not None)

    def _choose_addresses(
        self, found: Sequence[Registration], machines: Sequence[str]
    ) -> dict[int, str | None]:
        """Where each rank's workers, and the scheduler, are to listen."""
        wanted = [each.wanted_interface for each in found]
        if self._job.target is not None and not any(wanted):
            return dict.fromkeys(range(self.size))
        names = [each.host for each in found]
        same = names if len(set(machines)) == len(set(names)) else machines
        interfaces = {rank: each.interfaces for rank, each in enumerate(found)}
        return dict(choose_addresses(same, interfaces, wanted)[1])

    # -- the scheduler ------------------------------------------------------------------------------------------

    def _all_reached(self) -> None:
        self._test.under_way = False
        if (failure := self._test.failure()) is not None:
            self._end_with(failure)
        else:
            self._start_scheduler()

    def _start_scheduler(self) -> None:
        assert self.plan is not None  # the scheduler is started after it
        if self._job.target is not None:  # it runs already
            self._on_address(self._job.target.address, None)
            return
        role = self.plan.scheduler
        order = (self._listen[role.rank], self._config, self.plan.scheduler_device, facts_of(self.plan))
        self._send(role.rank, Kind.SCHEDULER, order)

    def _on_address(self, address: str, dashboard: str | None) -> None:
        """The scheduler is up: every rank may start its workers."""
        assert self.plan is not None  # the scheduler is started after the plan is made
        self._cluster = Cluster(address, dashboard)
        plan, target = self.plan, self._job.target
        with_gpus = {rank for host in plan.hosts if host.gpus for rank in host.ranks}
        workers_of: dict[int, list[WorkerPlan]] = {}
        for worker in plan.workers:
            workers_of.setdefault(worker.rank, []).append(worker)
        before = 0
        probes = probing_workers(plan) if self._transport.between_nodes else {}
        for rank in range(self.size):
            workers = tuple(workers_of.get(rank, ()))
            start = Start(
                address,
                protocol=target.protocol if target is not None else self._job.protocol,
                listen=self._listen[rank],
                workers=workers,
                config=self._config,
                beside_gpus=rank in with_gpus,
                is_client=rank == plan.client.rank,
                delay=start_delay(before, len(plan.workers)),
                limit=self._limit,
                transport=self._transport,
                ucx_probe=probes.get(rank),
            )
            before += len(workers)
            self._send(rank, Kind.START, start)

    def _all_ready(self) -> None:
        assert self.plan is not None  # ranks are ready after START
        assert self._cluster is not None  # as above
        full = replace(self._cluster, plan=self.plan, transport=self._transport.line, config=self._config)
        if any(self.steps.values()):
            steps = {rank: list(steps) for rank, steps in self.steps.items()}
            full = replace(full, hosts=dict(self.hosts), steps=steps)
        part = Cluster(self._cluster.address, None)
        for rank in range(1, self.size):
            self._send(rank, Kind.CLUSTER_UP, full if rank == self.plan.client.rank else part)
        self.outcome = full
