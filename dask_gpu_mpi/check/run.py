"""``check`` under a launcher: every rank looks and tests, rank 0 judges; all deadlines together stay below 20 s.

    DOING, FACTS from every rank -> plan, addresses -> LISTEN to the scheduler's rank -> LISTENING from it -> TEST to all
    -> TESTED from all -> the report -> DONE to all

What is wrong with a rank is a finding, not an error: only options that can't be used end it at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dask_gpu_mpi.base.failures import Failure, one_report, report_error
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, StartupError
from dask_gpu_mpi.mpi import launchers
from dask_gpu_mpi.mpi.gathering import FAIL, FLUSH, TICK, gather, report_to_all
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox, abort, load_mpi
from dask_gpu_mpi.network.interfaces import choose_addresses
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, Listener, Tokens, connect_to, port_problem
from dask_gpu_mpi.options.table import Options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.planner import Plan, make_plan

from .kernel import run_kernels
from .observations import Facts, take_facts
from .report import Evidence, Finding, Listening, Outcome, Report
from .rules import judge, split_remedy

__all__ = ["run_check"]

#: Seconds after the start of MPI: until all ranks must have joined and told what they see, and until the report.
LOOK, REPORT = 10.0, 15.0
#: Seconds before the report at which a kernel is given up, so that its rank can still tell.
KERNEL_MARGIN = 1.5
#: Seconds for the scheduler's rank to open its ports.
LISTEN = 2.0
#: Seconds beyond the report after which rank 0 says itself that it hangs, and the others no longer believe that it lives.
HEAD_GRACE, GRACE = 3.0, 4.0
LIMIT = f"the {LOOK:g} s that check gives it"


@dataclass(frozen=True)
class _Test:
    """What a rank is to test."""

    address: str
    port: int
    tokens: Tokens
    gpus: tuple[str, ...]
    seconds: float


def run_check(
    options: Options | InputError,
    *,
    kernel: bool,
    show: Callable[[Report], None],
    expect_gpus: int | None = None,
    has_client: bool = True,
) -> int:
    """Check this allocation.

    Parameters
    ----------
    options : Options or InputError
        What the user asked for, or why that can't be.
    kernel : bool
        Whether to run a kernel on each GPU.
    show : callable
        Is given the report, on one rank.
    expect_gpus : int, optional
        GPUs that each host is to have; what the batch system says, unless given.
    has_client : bool
        Whether the job is to run a script.

    Returns
    -------
    int
        The exit code, the same on all ranks.

    Raises
    ------
    DaskGpuMpiError
        The options can't be used, on all ranks; or rank 0 is gone.
    """
    environ, host = os.environ, socket.gethostname()
    for name in ("psutil", "pynvml"):
        # A part of the interpreters' start, so that the deadlines do not depend on the file system that they come from.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        mpi = load_mpi(environ, host)
    except InputError as error:
        return _alone(error, error.reported, show)
    started = time.monotonic()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    library = mpi.Get_library_version()
    problems: list[tuple[str, str]] = []
    try:
        launchers.cross_check(environ, size, rank, host, library=library)
    except LauncherError as error:
        if size == 1:  # ranks that can't tell each other
            return _alone(error, launchers.keeps_silent(environ), show)
        # Which rank this is, is said elsewhere.
        problems.append(("launcher", str(error).partition(f" on {host}: ")[2] or str(error)))
    try:
        mailbox = Mailbox(world, host, started + LOOK, limit=LIMIT)
    except StartupError as error:
        if rank == 0:
            _alone(error, False, show)
            error.reported = True
        report_error(error)
        abort(error.exit_code)
        raise
    me = _Rank(mailbox, environ, host)
    # Rank 0 watches the others, and nobody else can tell what it was doing; a world of one has nobody else at all.
    watch = _watch(me, started, show) if rank == 0 else None
    try:
        me.look(options, launchers.library_name(library), problems)
        if rank == 0:
            return _Head(mailbox, me, options, kernel, expect_gpus, has_client, started).run(show)
        return me.until_told(started + REPORT + GRACE)
    finally:
        if watch is not None:
            watch.cancel()
        me.close()


def _alone(error: DaskGpuMpiError, silent: bool, show: Callable[[Report], None]) -> int:
    """The report of a rank that can't speak with the others."""
    if not silent:
        found, remedy = split_remedy(str(error), "see above")
        show(Report(Evidence(size=0), (Finding("error", "launcher", found, remedy),)))
    return 1


def _watch(me: _Rank, started: float, show: Callable[[Report], None]) -> threading.Timer:
    """End the job should this rank still be busy when all is to be over: its main thread may hang in NVML or a file system."""

    def end() -> None:
        evidence = Evidence(me.size, doing={me.rank: (me.host, me.doing)}, silent=(me.rank,))
        report = Report(evidence, judge(evidence), time.monotonic() - started)
        try:
            show(report)
            flush()
            if me.size > 1:
                abort(report.exit_code)
        finally:  # MPICH may come back from the abort, and no exit handler can be trusted to end
            os._exit(report.exit_code)

    timer = threading.Timer(started + REPORT + HEAD_GRACE - time.monotonic(), end)
    timer.daemon = True
    timer.start()
    return timer


class _Rank:
    """What every rank does."""

    def __init__(self, mailbox: Mailbox, environ: Mapping[str, str], host: str) -> None:
        self.rank, self.size, self.host = mailbox.rank, mailbox.size, host
        #: What it is at.
        self.doing = "its options"
        self._mailbox = mailbox
        self._environ = environ
        self._listener: Listener | None = None
        self._pool = ThreadPoolExecutor(1)
        self._testing: Future[Outcome] | None = None

    def look(self, options: Options | InputError, library: str, problems: Iterable[tuple[str, str]]) -> None:
        """Tell rank 0 what this rank sees."""
        answer: Facts | Failure
        if isinstance(options, InputError):
            answer = Failure.of(options)
        else:
            answer = take_facts(
                self._mailbox.rank,
                self._mailbox.size,
                options,
                self._environ,
                library,
                problems=tuple(problems),
                tell=self._doing,
            )
        self._mailbox.send(0, "facts", answer)

    def _doing(self, what: str) -> None:
        self.doing = what
        self._mailbox.send(0, "doing", (self.host, what))

    def on_mail(self, mail: Mail) -> int | None:
        """Do what rank 0 says; the exit code once it is known."""
        if mail.kind == "listen":
            self._mailbox.send(0, "listening", self._listen(*mail.payload))
        elif mail.kind == "test":
            self._doing("its GPUs with a kernel, and connected to the scheduler's address")
            self._testing = self._pool.submit(self._test, mail.payload)
        elif mail.kind == FAIL:
            raise mail.payload.error(reported=True)
        elif mail.kind == "done":
            return int(mail.payload)
        return None

    def poll(self) -> None:
        """Tell rank 0 once the tests are over."""
        if self._testing is not None and self._testing.done():
            self._mailbox.send(0, "tested", self._testing.result())
            self._testing = None

    def _listen(
        self, address: str, port: int, tokens: Tokens, dashboard: tuple[str, int] | None
    ) -> Listening:
        blocked = port_problem(*dashboard) if dashboard is not None else ""
        try:
            self._listener = Listener(address, port, tokens)
        except OSError as error:
            return Listening(error=error.strerror or str(error), dashboard=blocked)
        return Listening(self._listener.port, dashboard=blocked)

    def _test(self, test: _Test) -> Outcome:
        # In a thread, so that rank 0 can hear the others meanwhile; MPI is left alone here.
        with ThreadPoolExecutor(1) as pool:
            kernels = pool.submit(run_kernels, test.gpus, self._environ, test.seconds)
            timeout = min(CONNECT_TIMEOUT, test.seconds / 2)
            reach = connect_to(test.address, test.port, test.tokens, timeout) if test.port else None
            return Outcome(reach, kernels.result())

    def until_told(self, deadline: float) -> int:
        """Serve rank 0 until it says how it ended."""
        while time.monotonic() < deadline:
            for mail in self._mailbox.receive():
                if (code := self.on_mail(mail)) is not None:
                    return code
            self.poll()
            time.sleep(TICK)
        error = StartupError(
            "rank 0 did not answer: it hangs while it looks at its host (GPUs, local directory); leave that host out",
            reported=self._mailbox.rank != 1,
        )
        report_error(error)
        abort(error.exit_code)
        raise error

    def close(self) -> None:
        """Leave nothing behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._listener is not None:
            self._listener.close()


class _Head:
    """What rank 0 does besides."""

    def __init__(
        self,
        mailbox: Mailbox,
        me: _Rank,
        options: Options | InputError,
        kernel: bool,
        expect_gpus: int | None,
        has_client: bool,
        started: float,
    ) -> None:
        self._mailbox = mailbox
        self._me = me
        self._options = options
        self._kernel = kernel
        self._expect_gpus = expect_gpus
        self._has_client = has_client
        self._started = started
        self._doing: dict[int, tuple[str, str]] = {}

    def run(self, show: Callable[[Report], None]) -> int:
        everybody = range(self._mailbox.size)
        answers = self._gather("facts", everybody, self._started + LOOK)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures or isinstance(self._options, InputError):
            self._refuse(failures)
        assert isinstance(self._options, Options)  # else this rank's own answer is a failure
        evidence = self._test(self._options, answers)
        report = Report(evidence, judge(evidence), time.monotonic() - self._started)
        # Before anybody leaves, since a launcher ends all ranks when one fails.
        show(report)
        flush()
        if evidence.silent:
            abort(report.exit_code)
        self._mailbox.send_all("done", report.exit_code)
        self._mailbox.flush(FLUSH)
        return report.exit_code

    def _gather(self, kind: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """Wait for what these ranks answer, as far as they do in time."""
        return gather(self._mailbox, kind, ranks, deadline, on_other=self._on_other, meanwhile=self._me.poll)

    def _on_other(self, mail: Mail) -> None:
        if mail.kind == "doing":
            self._doing[mail.source] = mail.payload
        else:
            self._me.on_mail(mail)

    def _refuse(self, failures: Mapping[int, Failure]) -> None:
        hosts = {rank: host for rank, (host, _) in self._doing.items()}
        error = one_report(failures, hosts, self._mailbox.size).error(reported=False)
        report_to_all(self._mailbox, error)
        raise error

    def _test(self, options: Options, facts: Mapping[int, Facts]) -> Evidence:
        size = self._mailbox.size
        plan, plan_problem = self._plan(options, facts)
        head = min(options.scheduler_rank, size - 1)
        shared: dict[str, Any] = {
            "size": size, "facts": facts, "doing": self._doing, "plan": plan, "plan_problem": plan_problem,
            "scheduler_rank": head, "port": options.scheduler_port or 0, "kernel": self._kernel,
            "dashboard_address": options.dashboard_address, "protocol": options.protocol,
            # workers without GPUs: nobody has looked for any
            "expect_gpus": None if options.worker_kind == "cpu" else self._expect_gpus,
        }  # fmt: skip
        silent = tuple(rank for rank in range(size) if rank not in facts)
        if silent:
            return Evidence(**shared, silent=silent)
        address, network_problem, listening, tokens = "", "", None, Tokens()
        try:
            address = choose_addresses(
                [facts[rank].host for rank in range(size)],
                {rank: facts[rank].interfaces for rank in range(size)},
                [facts[rank].wanted_interface for rank in range(size)],
            )[1][head]
        except InputError as error:
            network_problem = str(error)
        else:
            self._mailbox.send(
                head, "listen", (address, options.scheduler_port or 0, tokens, _dashboard(options))
            )
            listening = self._gather("listening", [head], time.monotonic() + LISTEN).get(
                head, Listening(error="no answer")
            )
        gpus: dict[int, list[str]] = {}
        for worker in plan.workers if plan is not None and self._kernel else ():
            if worker.device is not None:
                gpus.setdefault(worker.rank, []).append(worker.device)
        seconds = self._started + REPORT - KERNEL_MARGIN - time.monotonic()
        port = listening.port if listening is not None else 0
        for rank in range(size):
            test = _Test(address, port, tokens, tuple(gpus.get(rank, ())), seconds)
            self._mailbox.send(rank, "test", test)
        tests = self._gather("tested", range(size), self._started + REPORT)
        return Evidence(
            **shared,
            address=address,
            network_problem=network_problem,
            listening=listening,
            tests=tests,
            silent=tuple(rank for rank in range(size) if rank not in tests),
        )

    def _plan(self, options: Options, facts: Mapping[int, Facts]) -> tuple[Plan | None, str]:
        inventories = [facts[rank].inventory for rank in sorted(facts)]
        seen = [inventory for inventory in inventories if inventory is not None]
        if len(seen) < self._mailbox.size:
            return None, ""  # what is wrong with the others is told already
        try:
            return make_plan(seen, replace(placement_options(options), has_client=self._has_client)), ""
        except DaskGpuMpiError as error:
            return None, str(error)


def _dashboard(options: Options) -> tuple[str, int] | None:
    """Where the dashboard would listen; None: nowhere, or anywhere."""
    host, _, port = options.dashboard_address.rpartition(":")
    if not options.dashboard or not port.isdigit() or port == "0":
        return None
    return host.strip("[]"), int(port)
