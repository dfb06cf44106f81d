"""The command `check` on one rank: the start up to the scheduler, with tests; all deadlines together are below 20 s."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import (
    ALIVE,
    CHECK_HANGING,
    CHECK_RANK_0_LOST,
    FLUSH,
    OBSERVE_TIMEOUT,
    REPORT_TIMEOUT,
)
from dask_gpu_mpi.check.coordinator import PAYLOADS, CheckCoordinator, CheckKind, RankResult, RankTest
from dask_gpu_mpi.check.kernel import run_kernels
from dask_gpu_mpi.check.observations import observe, of_rank
from dask_gpu_mpi.check.report import Evidence, Finding, Report
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.ucx import UcxTrial
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, Problem, StartupError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites.launchers import library_name
from dask_gpu_mpi.startup.bringup import planner, report_only
from dask_gpu_mpi.startup.exchange import until_over
from dask_gpu_mpi.startup.messages import COORDINATOR, Channels, Event, Kind
from dask_gpu_mpi.startup.reachability import Connecting
from dask_gpu_mpi.startup.start_context import Patience, StartContext

PATIENCE = Patience(watchdog=CHECK_HANGING - ALIVE, others=CHECK_RANK_0_LOST)
DEADLINE_NAME = f"the deadline of check ({OBSERVE_TIMEOUT:g} s)"


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
        if isinstance(options, InputError):  # the user has to correct this first
            options.reported = error.reported
            raise options from None
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
        patience=PATIENCE,
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
                size,
                options,
                planner(options, context.timeline, None),
                kernel=kernel,
                expect_gpus=expect_gpus,
                send=channels.send,
                started=started,
                hosts=channels.mailbox.hosts,
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
        self._pool = ThreadPoolExecutor(1)
        self._testing: Future[RankResult] | None = None
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
            self._testing = self._pool.submit(self._test, payload)
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
        if self._testing is not None and self._testing.done():
            self._channels.send(COORDINATOR, CheckKind.TESTED, self._testing.result())
            self._testing = None

    def _test(self, test: RankTest) -> RankResult:
        kernels = run_kernels(test.gpus, self._context.environ, test.seconds)
        return RankResult(kernels, self._ucx.result() if self._ucx is not None else None)

    def close(self) -> None:
        """Stop listening and testing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
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
