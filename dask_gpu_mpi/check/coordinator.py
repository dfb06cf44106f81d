"""What rank 0 does for `check`: gather what the ranks see, have them test, judge, and show the one report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.mpi.gathering import FLUSH, gather, report_to_all
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox
from dask_gpu_mpi.network.interfaces import choose_addresses
from dask_gpu_mpi.network.reachability import Tokens
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan

from .observations import Facts
from .rank import CheckingRank, Kind, RankTest
from .report import Evidence, Listening, Report
from .rules import judge

__all__ = ["LOOK", "REPORT", "CheckCoordinator"]

#: Seconds after the start of MPI: until all ranks must have joined and told what they see, and until the report.
LOOK, REPORT = 10.0, 15.0
#: Seconds before the report at which a kernel is given up, so that its rank can still tell.
KERNEL_MARGIN = 1.5
#: Seconds for the scheduler's rank to open its ports.
LISTEN = 2.0


class CheckCoordinator:
    """What rank 0 does besides."""

    def __init__(
        self,
        mailbox: Mailbox,
        me: CheckingRank,
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
        """Gather, test, judge and show the report; the exit code, which all ranks are sent."""
        everybody = range(self._mailbox.size)
        answers = self._gather(Kind.FACTS, everybody, self._started + LOOK)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures or isinstance(self._options, InputError):
            self._refuse(failures)
        evidence = self._test(self._options, answers)
        report = Report(evidence, judge(evidence), time.monotonic() - self._started)
        # Before anybody leaves, since a launcher ends all ranks when one fails.
        show(report)
        flush()
        if evidence.silent:
            abort(report.exit_code)
        self._mailbox.send_all(Kind.DONE, report.exit_code)
        self._mailbox.flush(FLUSH)
        return report.exit_code

    def _gather(self, kind: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """Wait for what these ranks answer, as far as they do in time."""
        return gather(self._mailbox, kind, ranks, deadline, on_other=self._on_other, meanwhile=self._me.poll)

    def _on_other(self, mail: Mail) -> None:
        if mail.kind == Kind.DOING:
            self._doing[mail.source] = mail.payload
        else:
            self._me.on_mail(mail)

    def _refuse(self, failures: Mapping[int, Failure]) -> NoReturn:
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
                head, Kind.LISTEN, (address, options.scheduler_port or 0, tokens, _dashboard(options))
            )
            listening = self._gather(Kind.LISTENING, [head], time.monotonic() + LISTEN).get(
                head, Listening(error="no answer")
            )
        gpus: dict[int, list[str]] = {}
        for worker in plan.workers if plan is not None and self._kernel else ():
            if worker.device is not None:
                gpus.setdefault(worker.rank, []).append(worker.device)
        seconds = self._started + REPORT - KERNEL_MARGIN - time.monotonic()
        port = listening.port if listening is not None else 0
        for rank in range(size):
            test = RankTest(address, port, tokens, tuple(gpus.get(rank, ())), seconds)
            self._mailbox.send(rank, Kind.TEST, test)
        tests = self._gather(Kind.TESTED, range(size), self._started + REPORT)
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
