"""What rank 0 does for `check`: gather what the ranks observe, have them test, apply the rules, and show the one report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.mpi.gathering import FLUSH, gather, report_to_all
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox
from dask_gpu_mpi.network.interfaces import choose_addresses
from dask_gpu_mpi.network.node_pairs import MOST_IN_CHECK, Node, peers_by_rank, worker_ports
from dask_gpu_mpi.network.reachability import Tokens
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.startup.transport import choose_transport

from .observations import Observations
from .rank import CheckingRank, Kind, ListenOrder, RankTest
from .report import Evidence, Listening, Report
from .rules import apply_rules
from .ucx import UcxOrder
from .ucx_pairs import UcxPairs

__all__ = ["OBSERVE_TIMEOUT", "REPORT_TIMEOUT", "CheckCoordinator"]

#: Seconds after the start of MPI: until all ranks must have connected and sent what they observe, and until the report.
OBSERVE_TIMEOUT, REPORT_TIMEOUT = 10.0, 15.0
#: Seconds before the report at which kernels are killed, so that their ranks can still respond.
KERNEL_MARGIN = 1.5
#: Seconds for the scheduler's rank and one of each node to open their ports.
LISTEN_TIMEOUT = 2.0


@dataclass
class CheckCoordinator:
    """What rank 0 does besides its own part."""

    mailbox: Mailbox
    me: CheckingRank
    options: Options | InputError
    #: Whether to run a kernel on each GPU.
    kernel: bool
    #: GPUs that each node must have; None: as many as the batch system has allocated.
    expect_gpus: int | None
    #: Whether the job is to run a script.
    has_client: bool
    #: When MPI was started (``time.monotonic()``).
    started: float
    _steps: dict[int, tuple[str, str]] = field(default_factory=dict, init=False)
    _pairs: UcxPairs = field(default_factory=lambda: UcxPairs({}), init=False)

    def run(self, show: Callable[[Report], None]) -> int:
        """Gather, test, apply the rules and show the report; the exit code, which all ranks are sent."""
        answers = self._gather(Kind.OBSERVED, range(self.mailbox.size), self.started + OBSERVE_TIMEOUT)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures or isinstance(self.options, InputError):
            self._refuse(failures)
        evidence = self._collect(self.options, answers)
        report = Report(evidence, apply_rules(evidence), time.monotonic() - self.started)
        # Before any rank exits, since a launcher ends all ranks when one fails.
        show(report)
        flush()
        if evidence.silent:
            abort(report.exit_code)
        self.mailbox.send_all(Kind.DONE, report.exit_code)
        self.mailbox.flush(FLUSH)
        return report.exit_code

    def _gather(self, kind: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """The answers that arrive in time, in the order of ranks."""
        answers = gather(self.mailbox, kind, ranks, deadline, on_other=self._on_other, meanwhile=self.me.poll)
        return dict(sorted(answers.items()))

    def _on_other(self, mail: Mail) -> None:
        if mail.kind == Kind.STEP:
            self._steps[mail.source] = mail.payload
        elif mail.kind == Kind.UCX_ADDRESS:
            for rank, peer in self._pairs.add(mail.source, mail.payload):
                self.mailbox.send(rank, Kind.UCX_PEER, peer)
        else:
            self.me.on_mail(mail)

    def _refuse(self, failures: Mapping[int, Failure]) -> NoReturn:
        hosts = {rank: host for rank, (host, _) in self._steps.items()}
        error = one_report(failures, hosts, self.mailbox.size).error(reported=False)
        report_to_all(self.mailbox, error)
        raise error

    def _collect(self, options: Options, observations: Mapping[int, Observations]) -> Evidence:
        """All evidence; without tests where ranks are silent."""
        plan, plan_problem = self._plan(options, observations)
        head = min(options.scheduler_rank, self.mailbox.size - 1)
        evidence = Evidence(
            size=self.mailbox.size,
            observations=observations,
            steps=self._steps,
            plan=plan,
            plan_problem=plan_problem,
            scheduler_rank=head,
            port=options.scheduler_port or 0,
            dashboard_address=options.dashboard_address,
            silent=self._missing(observations),
            kernel=self.kernel,
            protocol=options.protocol,
            worker_ucx=options.worker_ucx,
            # without GPU workers no rank looks for GPUs
            expect_gpus=None if options.worker_kind == "cpu" else self.expect_gpus,
        )
        if evidence.silent:
            return evidence
        tokens = Tokens()
        try:
            addresses = choose_addresses(
                [observed.host for observed in observations.values()],
                {rank: observed.interfaces for rank, observed in observations.items()},
                [observed.interface for observed in observations.values()],
            )[1]
        except InputError as error:
            evidence = replace(evidence, network_problem=str(error))
        else:
            listening, nodes = self._listen(evidence, addresses, tokens, options)
            evidence = replace(evidence, address=addresses[head], listening=listening, nodes=nodes)
        self._start_tests(evidence, tokens)
        tests = self._gather(Kind.TESTED, range(self.mailbox.size), self.started + REPORT_TIMEOUT)
        return replace(evidence, tests=tests, silent=self._missing(tests))

    def _missing(self, answers: Mapping[int, object]) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.mailbox.size) if rank not in answers)

    def _listen(
        self, evidence: Evidence, addresses: Mapping[int, str], tokens: Tokens, options: Options
    ) -> tuple[Listening, tuple[Node, ...]]:
        """Have the scheduler's rank listen where the scheduler would, and one rank of each node where its workers would."""
        head = evidence.scheduler_rank
        firsts = [observed[0] for observed in evidence.by_host().values()]
        nodes = [Node(first.host, first.rank, addresses[first.rank]) for first in firsts]
        workers = {node.rank: (node.tokens, worker_ports(options)) for node in nodes if len(nodes) > 1}
        scheduler = (tokens, options.scheduler_port or 0, _dashboard(options))
        asked = sorted({head, *workers})
        for rank in asked:
            order = ListenOrder(addresses[rank], scheduler if rank == head else None, workers.get(rank))
            self.mailbox.send(rank, Kind.LISTEN, order)
        answers = self._gather(Kind.LISTENING, asked, time.monotonic() + LISTEN_TIMEOUT)
        silent = Listening(error="no response")
        listening = tuple(
            replace(node, port=answers.get(node.rank, silent).workers)
            for node in nodes
            if node.rank in workers
        )
        return answers.get(head, silent), listening

    def _start_tests(self, evidence: Evidence, tokens: Tokens) -> None:
        """Have each rank connect to the scheduler's address and to other nodes, and run a kernel on the GPUs of its workers.

        One rank of each node tries UCX as well, where workers are to use it.
        """
        gpus: dict[int, list[str]] = {}
        for worker in evidence.plan.workers if evidence.plan is not None and self.kernel else ():
            if worker.device is not None:
                gpus.setdefault(worker.rank, []).append(worker.device)
        port = evidence.listening.port if evidence.listening is not None else 0
        peers = peers_by_rank(evidence.nodes, MOST_IN_CHECK)
        seconds = self.started + REPORT_TIMEOUT - KERNEL_MARGIN - time.monotonic()
        devices, between_nodes = _tries_of_ucx(evidence)
        self._pairs = UcxPairs({rank: evidence.observations[rank].host for rank in devices if between_nodes})
        ucx = {rank: UcxOrder(device, self._pairs.peers_of(rank)) for rank, device in devices.items()}
        for rank in range(self.mailbox.size):
            uuids = tuple(gpus.get(rank, ()))
            test = RankTest(
                evidence.address, port, tokens, uuids, seconds, peers.get(rank, ()), ucx.get(rank)
            )
            self.mailbox.send(rank, Kind.TEST, test)

    def _plan(self, options: Options, observations: Mapping[int, Observations]) -> tuple[Plan | None, str]:
        """The plan, or why there is none; neither where a rank has no inventory, which has a finding of its own."""
        inventories = [observed.inventory for observed in observations.values() if observed.inventory]
        if len(inventories) < self.mailbox.size:
            return None, ""
        try:
            # the sizes of device memory of other ranks, which may differ, are not among the observations
            return make_plan(inventories, options, has_client=self.has_client, device_options={}), ""
        except DaskGpuMpiError as error:
            return None, str(error)


def _tries_of_ucx(evidence: Evidence) -> tuple[dict[int, str], bool]:
    """The first rank of each node that has workers which may use UCX, and the GPU of the first of these (empty: it has none);
    and whether they try it between nodes as well.
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


def _dashboard(options: Options) -> tuple[str, int] | None:
    """Where the dashboard would listen; None: nowhere, or anywhere.

    >>> _dashboard(Options(dashboard_address="[::1]:8787"))
    ('::1', 8787)
    """
    host, _, port = options.dashboard_address.rpartition(":")
    if not options.dashboard or not port.isdigit() or port == "0":
        return None
    return host.strip("[]"), int(port)
