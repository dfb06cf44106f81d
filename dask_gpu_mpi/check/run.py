"""The command `check`: the start up to the scheduler, with tests. All deadlines together are below 20 s.

Its phases are those of the start (`startup.coordinator`), with the same messages. There are three differences. A rank sends more
when it registers (`Observations`). Kernels and UCX are tested while the ranks connect. A problem of a rank is evidence, not an
error: only options that can't be used end a check at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import (
    ALIVE,
    CHECK_HANGING,
    CHECK_RANK_0_LOST,
    FLUSH,
    KERNEL_MARGIN,
    LISTEN_TIMEOUT,
    OBSERVE_TIMEOUT,
    REPORT_TIMEOUT,
)
from dask_gpu_mpi.check.kernel import KernelResult, run_kernels
from dask_gpu_mpi.check.observations import Observations, observe, of_rank
from dask_gpu_mpi.check.report import Evidence, Finding, Report
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.ucx import UcxErrors, UcxOrder, UcxPairs, UcxPeer, UcxTrial
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, Problem, StartupError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, MOST_IN_CHECK, Node
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.sites.launchers import library_name
from dask_gpu_mpi.startup.bringup import report_only
from dask_gpu_mpi.startup.coordinator import FailureCoordinator, Phase, addresses_of, plan_of
from dask_gpu_mpi.startup.messages import COORDINATOR, Channels, Kind
from dask_gpu_mpi.startup.reachability import Connecting, ReachabilityTest, choose_transport
from dask_gpu_mpi.startup.start_context import StartContext, until_over

DEADLINE_NAME = f"the deadline of check ({OBSERVE_TIMEOUT:g} s)"


class CheckKind(StrEnum):
    """Kinds of messages that a check has in addition to those of the start (`startup.messages.Kind`)."""

    #: Rank 0 to all: a `RankTests`.
    TEST = "test"
    #: A rank that tests UCX to rank 0: UCX's address of its child; empty: UCX does not work there.
    UCX_ADDRESS = "UCX address"
    #: Rank 0 to such a rank: a `UcxPeer`.
    UCX_PEER = "UCX peer"
    #: Every rank to rank 0: a `Tested`.
    TESTED = "tested"


@dataclass(frozen=True)
class RankTests:
    """The tests for a rank while it connects to others."""

    #: Until they must have ended.
    seconds: float
    #: UUIDs of the GPUs on which to run a kernel.
    kernels: tuple[str, ...] = ()
    #: None: UCX is not tested here.
    ucx: UcxOrder | None = None


#: The results of a rank's tests: of its kernels, and of UCX; None: UCX was not tested here.
Tested = tuple[tuple[KernelResult, ...], UcxErrors | None]
#: The type of each kind's payload, in addition to those of the start.
PAYLOADS: Mapping[str, Any] = {
    Kind.REGISTRATION: Observations,
    CheckKind.TEST: RankTests,
    CheckKind.UCX_ADDRESS: bytes,
    CheckKind.UCX_PEER: UcxPeer,
    CheckKind.TESTED: Tested,
}


def run_check(
    options: Options | InputError,
    *,
    kernel: bool,
    show: Callable[[Report], None],
    expect_gpus: int | None = None,
    has_client: bool = True,
) -> int:
    """Check this allocation, and return the exit code, the same on all ranks. `show` prints the report, on one rank.

    Raises a DaskGpuMpiError on all ranks if the options can't be used (`options` is then the error), or if rank 0 does not
    respond. `has_client`: the job will run a script. The others are as in `CheckCoordinator`.
    """
    environ, host = os.environ, socket.gethostname()
    for name in ("psutil", "pynvml"):
        # Before the deadlines begin, which must not depend on the file system of these modules.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        mpi = load_mpi(environ, host)
    except InputError as error:
        return _alone(error, error.reported, show)
    started = time.monotonic()
    context = StartContext(
        environ,
        None,
        has_client,
        started,
        started + OBSERVE_TIMEOUT,
        Signals(),
        Timeline("rank"),
        host=host,
        payloads=PAYLOADS,
        deadline_name=DEADLINE_NAME,
        hanging=CHECK_HANGING - ALIVE,
        rank_0_lost=CHECK_RANK_0_LOST,
        quiet=True,
        report_hanging=lambda channels: _hanging(channels, host, started, show),
    )
    if isinstance(options, InputError):
        report_only(options, context)
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    library = mpi.Get_library_version()
    problems: list[Problem] = []
    try:
        launcher_check.cross_check(environ, size, rank, host, library=library)
    except LauncherError as error:
        if size == 1:  # each rank is a separate world
            return _alone(error, launcher_check.wait_for_rank_0_to_report(environ), show)
        problems.append(of_rank(error.problem, "launcher"))
    with context.ending_in_order(None):
        try:
            channels = context.meet(None)
        except StartupError as error:
            if rank == COORDINATOR:
                _alone(error, False, show)
                error.reported = True
            error.fatal = True
            raise
        context.deadline = started + REPORT_TIMEOUT
        me = CheckingRank(options, channels, context)
        try:
            me.register(library_name(library), problems)
            if rank != COORDINATOR:
                return int(until_over(channels, context, None, me))
            coordinator = CheckCoordinator(
                channels.mailbox.hosts,
                options,
                kernel=kernel,
                expect_gpus=expect_gpus,
                send=channels.send,
                started=started,
            )
            return _report(channels, until_over(channels, context, coordinator, me), started, show)
        finally:
            me.close()


class CheckingRank:
    """The part of every rank in a check, including rank 0."""

    def __init__(self, options: Options, channels: Channels, context: StartContext) -> None:
        self._options = options
        self._channels = channels
        self._context = context
        self._connecting = Connecting(options, channels)
        self._results: queue.SimpleQueue[Tested] = queue.SimpleQueue()
        self._ucx: UcxTrial | None = None
        self._ucx_address_sent = False

    def register(self, library: str, problems: Sequence[Problem]) -> None:
        """Send rank 0 the observations of this rank."""
        options, channels, context = self._options, self._channels, self._context
        observed = observe(
            channels.rank,
            channels.size,
            options,
            context.environ,
            library,
            problems,
            channels.begin_step,
            has_client=context.has_client,
        )
        channels.send(COORDINATOR, Kind.REGISTRATION, observed)

    def on_event(self, event: Event) -> None:
        """Carry out an order of rank 0."""
        kind, payload = event.kind, event.payload
        if kind == CheckKind.TEST:
            self._channels.begin_step(
                "running a kernel on its GPUs, and connecting to the scheduler's address and to other nodes"
            )
            if payload.ucx is not None:
                # in this thread: a child dies with the thread that has started it
                self._ucx = UcxTrial(payload.ucx, self._context.environ, payload.seconds)
            # in another thread, so that this one can still receive
            threading.Thread(target=self._test, args=(payload,), daemon=True).start()
        elif kind == CheckKind.UCX_PEER and self._ucx is not None:
            self._ucx.introduce(payload)
        else:
            self._connecting.on_message(kind, payload)

    def poll(self) -> None:
        """Send rank 0 the address of UCX and the results of the tests, as soon as they are known."""
        self._connecting.poll()
        if (
            self._ucx is not None
            and not self._ucx_address_sent
            and (address := self._ucx.address) is not None
        ):
            self._channels.send(COORDINATOR, CheckKind.UCX_ADDRESS, address)
            self._ucx_address_sent = True
        with contextlib.suppress(queue.Empty):
            self._channels.send(COORDINATOR, CheckKind.TESTED, self._results.get_nowait())

    def _test(self, tests: RankTests) -> None:
        kernels = run_kernels(tests.kernels, self._context.environ, tests.seconds)
        ucx = self._ucx.result() if self._ucx is not None else None
        self._results.put((kernels, ucx))

    def close(self) -> None:
        """Stop listening."""
        self._connecting.close()


def _report(channels: Channels, evidence: Evidence, started: float, show: Callable[[Report], None]) -> int:
    """Show the report, let the other ranks end, and return the exit code."""
    report = Report(evidence, apply_rules(evidence), time.monotonic() - started)
    # Before any rank exits, since a launcher ends all ranks when one fails.
    show(report)
    flush()
    if evidence.silent:
        abort(report.exit_code)
    channels.mailbox.send_all(Kind.DONE, report.exit_code)
    channels.mailbox.flush(FLUSH)
    return report.exit_code


def _alone(error: DaskGpuMpiError, silent: bool, show: Callable[[Report], None]) -> int:
    """The report of a rank that has no connection to the others."""
    if not silent:
        finding = Finding.of("error", "launcher", error.problem, "see above")
        show(Report(Evidence(size=0), (finding,)))
    return 1


def _hanging(channels: Channels, host: str, started: float, show: Callable[[Report], None]) -> int:
    """Report that rank 0 itself hangs: its main thread, in NVML or a file system."""
    rank = channels.rank
    evidence = Evidence(channels.size, steps={rank: (host, channels.step)}, silent=(rank,))
    report = Report(evidence, apply_rules(evidence), time.monotonic() - started)
    show(report)
    return report.exit_code


# Rank 0.


class CheckCoordinator(FailureCoordinator):
    """Rank 0's part of a check; the outcome is the `Evidence`.

    `options` are those of rank 0. `kernel`: run a kernel on each GPU.
    `expect_gpus`: GPUs that each node must have (None: as many as the batch system has allocated). `send(rank, kind, payload)`
    sends a message. `started`: when MPI was started (``time.monotonic()``). `hosts`: host of each rank.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        options: Options,
        *,
        kernel: bool,
        expect_gpus: int | None,
        send: Callable[[int, str, Any], None],
        started: float,
    ) -> None:
        super().__init__(hosts, deadline=started + OBSERVE_TIMEOUT)
        self._options = options
        self._kernel = kernel
        self._expect_gpus = expect_gpus
        self._send = send
        self._started = started
        self._test = ReachabilityTest(range(self.size), send)
        self._pairs = UcxPairs({})
        self._tested: dict[int, Tested] = {}
        #: The evidence before the tests.
        self._evidence = Evidence(self.size)

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
            if len(self._registrations) == self.size or now > self.deadline:
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
        self._evidence = Evidence(
            size=self.size,
            options=options,
            observations=observations,
            plan=plan,
            plan_problem=plan_problem,
            silent=self._missing(observations),
            kernel=self._kernel,
            # without GPU workers no rank lists its GPUs
            expect_gpus=None if options.worker_kind == "cpu" else self._expect_gpus,
        )
        head = self._evidence.scheduler_rank
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
        firsts = [observed[0] for observed in self._evidence.by_host()]
        nodes = [Node(first.host, first.rank, addresses[first.rank]) for first in firsts]
        self.phase, self.deadline = Phase.REACH, now + LISTEN_TIMEOUT
        self._test.listen(head, observations[head].host, nodes, addresses, dashboard=True)

    def _make_plan(self, observations: Mapping[int, Observations]) -> tuple[Plan | None, Problem | None]:
        """The plan, or why there is none; neither if a rank has no inventory, which is another finding."""
        found = [observed for observed in observations.values() if observed.inventory is not None]
        if len(found) < self.size:
            return None, None
        try:
            return plan_of(found, self._options), None
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
            tests = RankTests(seconds, tuple(gpus.get(rank, ())), ucx.get(rank))
            self._send(rank, CheckKind.TEST, tests)
        if has_addresses:
            self._test.connect(MOST_IN_CHECK, min(CONNECT_TIMEOUT, seconds / 2))

    def _finish(self) -> None:
        evidence = self._evidence
        if not evidence.silent:
            tests = {
                rank: tested
                for rank, tested in sorted(self._tested.items())
                if rank not in self._test.awaited
            }
            evidence = replace(
                evidence,
                kernels={rank: kernels for rank, (kernels, _) in tests.items()},
                ucx={rank: ucx for rank, (_, ucx) in tests.items() if ucx is not None},
                reached=dict(sorted(self._test.reached.items())),
                silent=self._missing(tests),
            )
        steps = {rank: (self.hosts[rank], step) for rank, step in self.steps.items()}
        self.outcome = replace(evidence, steps=steps)


def _tries_of_ucx(evidence: Evidence) -> tuple[dict[int, str], bool]:
    """The ranks that test UCX, one of each node, each with the GPU of its first worker (empty: none); and whether UCX is tested
    between nodes as well.
    """
    if evidence.plan is None:
        return {}, False
    try:
        transport = choose_transport(evidence.options.worker_ucx, evidence.plan, evidence.abilities)
    except InputError:
        return {}, False
    if transport.ucx is WorkerUcx.OFF:
        return {}, False
    devices: dict[int, str] = {}
    for worker in evidence.plan.workers:
        if worker.kind == "gpu" or transport.ucx is WorkerUcx.ALL:
            devices.setdefault(worker.rank, worker.devices[0] if worker.devices else "")
    firsts: dict[int, str] = {}
    for observed in evidence.by_host():
        able = [each.rank for each in observed if each.rank in devices and not each.ucx.obstacle]
        if able:
            firsts[able[0]] = devices[able[0]]
    return firsts, transport.between_nodes
