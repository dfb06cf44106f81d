"""A check from its start to its end on one rank, without MPI; with it: tests/mpi/test_check.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.check import run as module
from dask_gpu_mpi.check.report import Report
from dask_gpu_mpi.check.run import run_check
from dask_gpu_mpi.errors import InputError, LauncherError, OptionError, Problem, StartupError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup import start_context
from dask_gpu_mpi.startup.messages import Kind
from support.mocks.preflights import MockMailbox

CPUS = Options(worker_class="distributed.Nanny", interface="lo")


class Process:
    """What `run_check` finds in its process: MPI and its launcher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 1) -> None:
        self.reports: list[Report] = []
        self.codes: list[int] = []
        self.mailbox: Any = MockMailbox(size=size)
        self.raises: dict[str, Exception] = {}
        world = SimpleNamespace(Get_rank=lambda: self.mailbox.rank, Get_size=lambda: size)
        mpi = SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "Open MPI v5.0.11, package")
        monkeypatch.setattr(module, "load_mpi", lambda *_: self._maybe("load_mpi") or mpi)
        monkeypatch.setattr(start_context, "load_mpi", lambda *_: mpi)
        monkeypatch.setattr(start_context, "Mailbox", self._mailbox)
        monkeypatch.setattr(start_context, "abort", self.codes.append)
        monkeypatch.setattr(module.launcher_check, "cross_check", lambda *_, **__: self._maybe("cross_check"))

    def _mailbox(self, world: Any, host: str, deadline: float, payloads: Any, **more: Any) -> Any:
        assert payloads == self.mailbox.payloads
        assert abs(deadline - time.monotonic() - module.OBSERVE_TIMEOUT) < 1
        assert more["deadline_name"] == "the deadline of check (10 s)"
        self._maybe("Mailbox")
        return self.mailbox

    def _maybe(self, what: str) -> None:
        if what in self.raises:
            raise self.raises[what]

    def run(self, options: Options | InputError = CPUS) -> int:
        return run_check(options, kernel=True, show=self.reports.append)

    @property
    def found(self) -> list[tuple[str, str, str]]:
        (report,) = self.reports
        return [(one.what, one.found, one.fix) for one in report.findings if one.level == "error"]


def test_launcher_and_library_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Process(monkeypatch, size=2)
    two.mailbox.rank = 1
    two.raises["cross_check"] = LauncherError("2 ranks", expected="3", fix="use srun", where="rank 1 of 3")
    two.mailbox.on_send = lambda rank, kind, payload: (
        two.mailbox.mails.append(Event(0, Kind.DONE, 1)) if kind == Kind.REGISTRATION else None
    )
    assert two.run() == 1
    observed = two.mailbox.sent[-1][2]
    assert observed.problems == (Problem("2 ranks", "3", "use srun", what="launcher"),)
    assert two.reports == []


@pytest.mark.parametrize("reported", [True, False])
def test_no_mpi_library(monkeypatch: pytest.MonkeyPatch, reported: bool) -> None:
    process = Process(monkeypatch)
    process.raises["load_mpi"] = InputError("no MPI library", reported=reported)
    assert process.run() == 1
    assert [report.evidence.size for report in process.reports] == ([] if reported else [0])
    if not reported:
        assert process.found == [("launcher", "no MPI library", "see above")]


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


def test_the_exit_code_goes_to_all_after_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    assert run_check(Options(interface="lo"), kernel=True, show=process.reports.append, expect_gpus=9) == 1
    assert process.mailbox.sent[-1] == (-1, Kind.DONE, 1)
    assert [what for what, _, _ in process.found] == ["GPUs"]


@pytest.mark.parametrize("rank", [0, 1])
def test_options_that_can_not_be_used(
    monkeypatch: pytest.MonkeyPatch, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Process(monkeypatch, size=rank + 1)
    process.mailbox.rank = rank
    if rank:
        process.mailbox.on_send = lambda _, kind, payload: process.mailbox.mails.append(
            Event(0, Kind.FAIL, payload)
        )
    with pytest.raises(OptionError, match="--nthreads: invalid") as caught:
        process.run(OptionError("--nthreads: invalid"))
    assert caught.value.reported
    assert process.reports == []
    assert capsys.readouterr().err == ("" if rank else "dask_gpu_mpi: error: --nthreads: invalid\n")
