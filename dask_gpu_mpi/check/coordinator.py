"""`check` on rank 0: collect the observations of the ranks, order tests, and collect the results; a state machine.

The phases are those of the start up to the scheduler (`startup.coordinator`), with the same messages. There are three
differences. A rank sends more when it registers (`Observations`). Kernels and UCX are tested while the ranks connect. A problem
of a rank is evidence, not an error: only options that can't be used end a check at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.base.timeouts import KERNEL_MARGIN, LISTEN_TIMEOUT, OBSERVE_TIMEOUT, REPORT_TIMEOUT
from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.report import Evidence, Outcome
from dask_gpu_mpi.check.ucx import UcxOrder, UcxPairs, UcxPeer, UcxResult
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, MOST_IN_CHECK, Node
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.startup.coordinator import FailureCoordinator, MakePlan, Phase, addresses_of, plan_of
from dask_gpu_mpi.startup.messages import Event, Kind, Registration
from dask_gpu_mpi.startup.reachability import ReachabilityTest, choose_transport


class CheckKind(StrEnum):
    """Kinds of messages that a check has in addition to those of the start (`startup.messages.Kind`)."""

    #: Rank 0 to all: a `RankTest`.
    TEST = "test"
    #: A rank that tests UCX to rank 0: UCX's address of its child; empty: UCX does not work there.
    UCX_ADDRESS = "UCX address"
    #: Rank 0 to such a rank: a `UcxPeer`.
    UCX_PEER = "UCX peer"
    #: Every rank to rank 0: a `RankResult`.
    TESTED = "tested"


@dataclass(frozen=True)
class RankTest:
    """The tests for a rank while it connects to others."""

    #: UUIDs of the GPUs on which to run a kernel.
    gpus: tuple[str, ...]
    #: Until the kernels must have ended.
    seconds: float
    #: None: UCX is not tested here.
    ucx: UcxOrder | None = None


@dataclass(frozen=True)
class RankResult:
    """The results of a `RankTest`."""

    kernels: tuple[KernelResult, ...] = ()
    #: None: it was not tested here.
    ucx: UcxResult | None = None


#: The type of each kind's payload, in addition to those of the start. A rank whose options can't be used registers as there.
PAYLOADS: Mapping[str, Any] = {
    Kind.REGISTRATION: Observations | Registration,
    CheckKind.TEST: RankTest,
    CheckKind.UCX_ADDRESS: bytes,
    CheckKind.UCX_PEER: UcxPeer,
    CheckKind.TESTED: RankResult,
}


class CheckCoordinator(FailureCoordinator):
    """Rank 0's part of a check; the outcome is the `Evidence`.

    `options` are those of rank 0. `plan` is as in `startup.coordinator.Job`. `kernel`: run a kernel on each GPU.
    `expect_gpus`: GPUs that each node must have (None: as many as the batch system has allocated). `send(rank, kind, payload)`
    sends a message. `started`: when MPI was started (``time.monotonic()``). `hosts`: host of each rank.
    """

    def __init__(
        self,
        size: int,
        options: Options,
        plan: MakePlan,
        *,
        kernel: bool,
        expect_gpus: int | None,
        send: Callable[[int, str, Any], None],
        started: float,
        hosts: Mapping[int, str],
    ) -> None:
        super().__init__(size, deadline=started + OBSERVE_TIMEOUT, hosts=hosts)
        self._options = options
        self._plan = plan
        self._kernel = kernel
        self._expect_gpus = expect_gpus
        self._send = send
        self._started = started
        self._test = ReachabilityTest(range(size), send)
        self._pairs = UcxPairs({})
        self._tested: dict[int, RankResult] = {}
        #: The evidence before the tests.
        self._evidence = Evidence(size)

    def handle(self, event: Event, now: float) -> bool:
        """Handle one message; False if it is not for rank 0's part of the check."""
        source, kind, payload = event
        if super().handle(event, now):
            return True
        if source is None:
            return False
        if kind == Kind.LISTENING:
            self._test.on_listening(source, payload)
        elif kind == Kind.REACHED:
            self._test.on_reached(source, payload)
        elif kind == CheckKind.TESTED:
            self._tested[source] = payload
        elif kind == CheckKind.UCX_ADDRESS:
            for rank, peer in self._pairs.add(source, payload):
                self._send(rank, CheckKind.UCX_PEER, peer)
        else:
            return False
        return True

    def tick(self, now: float) -> None:
        """Go on to the next phase when it is time to."""
        if self._failures or self.outcome is not None:
            super().tick(now)
        elif self.phase is Phase.REGISTER:
            if self._all_registered or now > self.deadline:
                self._observed(now)
        elif self.phase is Phase.REACH:
            if not self._test.awaited or now > self.deadline:
                self._begin_tests(now)
        elif not (self._test.awaited or self._missing(self._tested)) or now > self.deadline:
            self._finish()

    def _missing(self, answers: Mapping[int, object]) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in answers)

    def _observed(self, now: float) -> None:
        """Make the plan, and let ranks listen; without tests if ranks are silent."""
        found = self._registrations
        observations = {rank: each for rank, each in sorted(found.items()) if isinstance(each, Observations)}
        plan, plan_problem = self._make_plan(observations)
        options = self._options
        head = min(options.scheduler_rank, self.size - 1)
        self._evidence = Evidence(
            size=self.size,
            observations=observations,
            plan=plan,
            plan_problem=plan_problem,
            scheduler_rank=head,
            port=options.scheduler_port or 0,
            dashboard_address=options.dashboard_address,
            silent=self._missing(observations),
            kernel=self._kernel,
            protocol=options.protocol,
            worker_ucx=options.worker_ucx,
            # without GPU workers no rank lists its GPUs
            expect_gpus=None if options.worker_kind == "cpu" else self._expect_gpus,
        )
        if self._evidence.silent:
            self._finish()
            return
        try:
            addresses = addresses_of([*observations.values()])
        except InputError as error:
            self._evidence = replace(self._evidence, network_problem=error.problem)
            self._begin_tests(now)
            return
        self._evidence = replace(self._evidence, address=addresses[head])
        firsts = [observed[0] for observed in self._evidence.by_host().values()]
        nodes = [Node(first.host, first.rank, addresses[first.rank]) for first in firsts]
        self.phase, self.deadline = Phase.REACH, now + LISTEN_TIMEOUT
        self._test.listen(head, observations[head].host, nodes, addresses, dashboard=True)

    def _make_plan(self, observations: Mapping[int, Observations]) -> tuple[Plan | None, Problem | None]:
        """The plan, or why there is none; neither if a rank has no inventory, which is another finding."""
        found = [observed for observed in observations.values() if observed.inventory is not None]
        if len(found) < self.size:
            return None, None
        try:
            return plan_of(found, self._plan), None
        except DaskGpuMpiError as error:
            return None, error.problem

    def _begin_tests(self, now: float) -> None:
        """Let each rank run a kernel on the GPUs of its workers, and connect to the scheduler's address and to other nodes.

        One rank of each node tests UCX as well, if workers will use it.
        """
        has_addresses = self.phase is Phase.REACH
        self.phase, self.deadline = Phase.TESTS, self._started + REPORT_TIMEOUT
        seconds = self.deadline - KERNEL_MARGIN - now
        if has_addresses:
            listening, nodes = self._test.scheduler, self._test.nodes
            self._evidence = replace(self._evidence, listening=listening, nodes=nodes)
        gpus: dict[int, list[str]] = {}
        plan = self._evidence.plan
        for worker in plan.workers if plan is not None and self._kernel else ():
            if worker.device is not None:
                gpus.setdefault(worker.rank, []).append(worker.device)
        devices, between_nodes = _tries_of_ucx(self._evidence)
        observations = self._evidence.observations
        self._pairs = UcxPairs({rank: observations[rank].host for rank in devices if between_nodes})
        nics = {worker.device: worker.nics for worker in (plan.workers if plan is not None else ())}
        ucx = {
            rank: UcxOrder(device, self._pairs.peers_of(rank), nics.get(device, ""))
            for rank, device in devices.items()
        }
        for rank in range(self.size):
            test = RankTest(tuple(gpus.get(rank, ())), seconds, ucx.get(rank))
            self._send(rank, CheckKind.TEST, test)
        if has_addresses:
            self._test.connect(MOST_IN_CHECK, min(CONNECT_TIMEOUT, seconds / 2))

    def _finish(self) -> None:
        evidence = self._evidence
        if not evidence.silent:
            reached = self._test.reached
            tests = {
                rank: Outcome(
                    reached[rank].scheduler if rank in reached else None,
                    tested.kernels,
                    reached[rank].lost if rank in reached else (),
                    tested.ucx,
                )
                for rank, tested in sorted(self._tested.items())
                if rank not in self._test.awaited
            }
            evidence = replace(evidence, tests=tests, silent=self._missing(tests))
        hosts = self.hosts
        steps = {rank: (hosts.get(rank, ""), step) for rank, step in self.steps.items()}
        self.outcome = replace(evidence, steps=steps)


def _tries_of_ucx(evidence: Evidence) -> tuple[dict[int, str], bool]:
    """The ranks that test UCX, one of each node, each with the GPU of its first worker (empty: none); and whether UCX is tested
    between nodes as well.
    """
    if evidence.plan is None:
        return {}, False
    try:
        transport = choose_transport(evidence.worker_ucx, evidence.plan, evidence.abilities)
    except InputError:
        return {}, False
    if transport.ucx is WorkerUcx.OFF:
        return {}, False
    devices: dict[int, str] = {}
    for worker in evidence.plan.workers:
        if worker.kind == "gpu" or transport.ucx is WorkerUcx.ALL:
            devices.setdefault(worker.rank, worker.devices[0] if worker.devices else "")
    firsts: dict[int, str] = {}
    for observed in evidence.by_host().values():
        able = [each.rank for each in observed if each.rank in devices and not each.ucx.obstacle]
        if able:
            firsts[able[0]] = devices[able[0]]
    return firsts, transport.between_nodes
