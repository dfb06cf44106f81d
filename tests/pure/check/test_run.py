"""A check from its start to its end on one rank, without MPI; with it: tests/mpi/test_check.py."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.check import run as module
from dask_gpu_mpi.check.rank import CheckingRank
from dask_gpu_mpi.check.report import Report
from dask_gpu_mpi.check.run import run_check
from dask_gpu_mpi.errors import InputError, LauncherError, StartupError
from dask_gpu_mpi.options.model import Options
from preflights import MockMailbox

CPUS = Options(worker_class="distributed.Nanny", interface="lo")


class Process:
    """What `run_check` finds in its process: MPI and its launcher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 1) -> None:
        self.reports: list[Report] = []
        self.codes: list[int] = []
        self.waits: list[Any] = []
        self.mailbox: Any = MockMailbox(size=size)
        self.raises: dict[str, Exception] = {}
        world = SimpleNamespace(Get_rank=lambda: self.mailbox.rank, Get_size=lambda: size)
        mpi = SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "Open MPI v5.0.11, package")
        monkeypatch.setattr(module, "load_mpi", lambda *_: self._maybe("load_mpi") or mpi)
        monkeypatch.setattr(module, "Mailbox", self._mailbox)
        monkeypatch.setattr(module.launcher_check, "cross_check", lambda *_, **__: self._maybe("cross_check"))
        monkeypatch.setattr(module.launcher_check, "wait_for_rank_0_to_report", lambda environ: self.silent)
        monkeypatch.setattr(module, "abort", self.codes.append)
        self.silent = False

    def _mailbox(self, world: Any, host: str, deadline: float, payloads: Any, *, deadline_name: str) -> Any:
        assert payloads is self.mailbox.payloads
        assert 9 < deadline - time.monotonic() <= 10
        assert deadline_name == "the deadline of check (10 s)"
        self._maybe("Mailbox")
        return self.mailbox

    def _maybe(self, what: str) -> None:
        if what in self.raises:
            raise self.raises[what]

    def run(self) -> int:
        return run_check(CPUS, kernel=True, show=self.reports.append)

    @property
    def found(self) -> list[tuple[str, str, str]]:
        (report,) = self.reports
        return [(one.what, one.found, one.fix) for one in report.findings if one.level == "error"]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_a_world_of_one_rank(process: Process) -> None:
    assert process.run() == 0
    (report,) = process.reports
    assert report.evidence.observations[0].versions["MPI library"] == "Open MPI v5.0.11"
    assert report.evidence.observations[0].host == socket.gethostname()
    assert process.found == []


def test_launcher_and_library_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Process(monkeypatch, size=2)
    two.mailbox.rank = 1
    two.raises["cross_check"] = LauncherError("rank 1 of 3 on h: 2 ranks (expected 3). Fix: use srun")
    two.mailbox.on_send = lambda rank, kind, payload: two.mailbox.mails.append(
        SimpleNamespace(source=0, kind="done", payload=1)
    )
    assert two.run() == 1
    observed = two.mailbox.sent[-1][2]
    assert observed.problems == (("launcher", "2 ranks (expected 3). Fix: use srun"),)
    assert two.reports == []


@pytest.mark.parametrize("silent", [True, False])
def test_each_rank_is_a_world_of_its_own(process: Process, silent: bool) -> None:
    process.silent = silent
    process.raises["cross_check"] = LauncherError("rank 0 of 3 on h: singleton. Fix: use srun")
    assert process.run() == 1
    if silent:
        assert process.reports == []
    else:
        assert process.found == [("launcher", "rank 0 of 3 on h: singleton", "use srun")]


@pytest.mark.parametrize("reported", [True, False])
def test_no_mpi_library(process: Process, reported: bool) -> None:
    process.raises["load_mpi"] = InputError("no MPI library", reported=reported)
    assert process.run() == 1
    assert [bool(process.reports)] == [not reported]
    if not reported:
        assert process.found == [("launcher", "no MPI library", "see above")]
        assert process.reports[0].evidence.size == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_connect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    process = Process(monkeypatch, size=2)
    process.mailbox.rank = rank
    process.raises["Mailbox"] = StartupError("rank 1 of 2: no response. Fix: leave it out")
    with pytest.raises(StartupError):
        process.run()
    assert process.codes == [1]
    assert len(process.reports) == (rank == 0)
    assert capsys.readouterr().err.count("no response") == (rank != 0)


@pytest.mark.parametrize("size", [1, 2])
def test_rank_0_that_hangs_reports_itself(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    process = Process(monkeypatch, size=size)
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    me = CheckingRank(process.mailbox, {}, "h1")
    late = time.monotonic() - module.REPORT_TIMEOUT - module.HEAD_GRACE
    timer = module._watch(me, late, process.reports.append)
    timer.join(10)
    assert (exits, process.codes) == ([1], [1] if size == 2 else [])
    assert [(what, found) for what, found, _ in process.found] == [
        ("ranks", "no response; last step: reading its options")
    ]
    (report,) = process.reports
    assert report.findings[0].hosts == ("h1",)
    assert module.REPORT_TIMEOUT < report.seconds < module.REPORT_TIMEOUT + module.HEAD_GRACE + 10
    assert timer.daemon


def test_the_watch_ends_with_the_check(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = []
    watch = module._watch
    monkeypatch.setattr(module, "_watch", lambda *given: timers.append(watch(*given)) or timers[-1])
    process.run()
    (timer,) = timers
    assert 15 < timer.interval <= module.REPORT_TIMEOUT + module.HEAD_GRACE
    timer.join(10)
    assert not timer.is_alive()


def test_all_deadlines_stay_below_20_seconds() -> None:
    assert module.OBSERVE_TIMEOUT < module.REPORT_TIMEOUT
    assert module.REPORT_TIMEOUT + module.HEAD_GRACE < module.REPORT_TIMEOUT + module.GRACE < 20
    assert module.REPORT_TIMEOUT + module.HEAD_GRACE == 18  # docs/check.md
