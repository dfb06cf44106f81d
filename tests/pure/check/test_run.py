"""A start that fails, the options of a check, the pairs of workers, and the rounds of tasks, with a mock of Dask's client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import report_by, report_error
from dask_gpu_mpi.base.timeouts import CHECK_START
from dask_gpu_mpi.check.report import Evidence
from dask_gpu_mpi.check.run import (
    LEAST,
    MOST,
    Rounds,
    neighbours,
    options_of_check,
    report_of_failure,
    transfer_size,
)
from dask_gpu_mpi.check.tasks import KernelResult, Received
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    LauncherError,
    MpiMissingError,
    PlacementError,
    StartupError,
    world_too_small,
)
from dask_gpu_mpi.options.model import Options
from support.mocks.preflights import evidence, inventory, observed


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (LauncherError("no"), "launcher"),
        (MpiMissingError("no"), "launcher"),
        (PlacementError("no"), "placement"),
        (world_too_small("no"), "placement"),
        (StartupError("no"), "start"),
        (InputError("no", what="scratch"), "scratch"),
    ],
)
def test_the_line_of_an_error(error: DaskGpuMpiError, what: str) -> None:
    report = report_of_failure(error, 1.5)
    (finding,) = report.findings
    assert (finding.level, finding.what, finding.found) == ("error", what, "no")
    assert finding.fix
    assert (report.exit_code, report.seconds) == (1, 1.5)


def test_an_error_is_printed_once_by_whoever_prints_errors(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[DaskGpuMpiError] = []
    refused, shown = StartupError("refused"), StartupError("shown")
    with report_by(lambda error: error is shown and not printed.append(error)):  # type: ignore[func-returns-value]
        for error in (refused, shown, shown):
            report_error(error)
    report_error(StartupError("later"))
    assert printed == [shown]
    assert capsys.readouterr().err.splitlines() == [
        "dask_gpu_mpi: error: refused",
        "dask_gpu_mpi: error: later",
    ]


def test_the_options_of_a_check() -> None:
    files = {"report": "r.html", "log_directory": "logs", "scheduler_file": "s.json", "summary": True}
    checked = options_of_check(Options(**files, nthreads=3))
    assert checked == Options(nthreads=3, startup_timeout=CHECK_START)
    chosen = Options(startup_timeout=300.0, explicit=frozenset({"startup_timeout"}))
    assert options_of_check(chosen) == chosen
    attached = Options(scheduler=False, scheduler_file="s.json", startup_timeout=CHECK_START)
    assert options_of_check(attached) == attached


def names(pairs: list[Any]) -> list[tuple[Any, Any]]:
    return [(sender.name, receiver.name) for sender, receiver in pairs]


def test_neighbours() -> None:
    plan = evidence(inventory(0, size=3), inventory(1, size=3, gpus=3), inventory(2, size=3, gpus=1)).plan
    within, between = neighbours(plan, plan.workers)
    assert names(within) == [("0-0", "0-1"), ("0-1", "0-0"), ("1-0", "1-1"), ("1-1", "1-2"), ("1-2", "1-0")]
    assert names(between) == [
        ("0-0", "1-0"), ("0-1", "1-1"), ("1-0", "2-0"), ("1-1", "2-0"), ("1-2", "2-0"), ("2-0", "0-0"),
    ]  # fmt: skip
    within, between = neighbours(plan, [one for one in plan.workers if one.name in ("0-1", "2-0")])
    assert (within, names(between)) == ([], [("0-1", "2-0"), ("2-0", "0-1")])
    assert neighbours(plan, plan.workers[:1]) == neighbours(plan, ()) == ([], [])


def test_workers_beside_gpus_come_last() -> None:
    plan = evidence(inventory(0, size=1), cpu_workers=1, transfers=()).plan
    assert names(neighbours(plan, plan.workers[::-1])[0])[-1] == ("0-cpu-0", "0-1")


def test_the_workers_of_a_node_share_the_bytes() -> None:
    one, many = (evidence(inventory(0, size=1, gpus=gpus)).plan for gpus in (1, 100))
    assert transfer_size(one, on_device=True) == MOST > transfer_size(one, on_device=False)
    assert transfer_size(many, on_device=False) == LEAST < transfer_size(many, on_device=True)


class MockClient:
    """Runs tasks at once, with the results that a test has chosen by function and worker; None: none comes."""

    loop = None

    def __init__(self, **results: Callable[[Any], Any]) -> None:
        self.results = results

    def submit(self, function: Any, *arguments: Any, workers: list[Any], **_: Any) -> Any:
        result = self.results[function.__name__](workers[0])
        status = "pending" if result is None else "error" if isinstance(result, Exception) else "finished"
        return MockFuture(key="", status=status, result=result)


class MockFuture(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evidence]:
    def completed(futures: Any, **_: Any) -> Any:
        futures = list(futures)
        for future in futures:
            if future.status != "pending":
                yield future, (type, future.result, None) if future.status == "error" else future.result
        if any(future.status == "pending" for future in futures):
            raise TimeoutError

    monkeypatch.setattr("distributed.as_completed", completed)
    fine = {
        "observe": lambda name: observed(ahead=0.5),
        "run_kernel": lambda name: {f"GPU-h1-{name[-1]}": KernelResult()},
        "make_data": lambda name: b"data",
        "receive": lambda name: Received(0.5, True, True),
        "last_look": lambda name: (0.25, {"10.0.0.2": "no device"} if name == "0-0" else {}),
    }

    def run(kernel: bool = True, **results: Callable[[Any], Any]) -> Evidence:
        empty = {"observations": {}, "kernels": {}, "transfers": (), "clocks": {}}
        start = replace(evidence(inventory(0, size=1)), kernel=kernel, **empty)
        client: Any = MockClient(**{**fine, **results})
        return Rounds(client, start).run()

    return run


def kinds(found: Evidence) -> dict[Any, str]:
    return {uuid: result.kind for uuid, result in found.kernels.items()}


def test_rounds_of_workers_without_a_problem(rounds: Callable[..., Evidence]) -> None:
    found = rounds()
    assert kinds(found) == {"GPU-h1-0": "", "GPU-h1-1": ""}
    assert (found.silent, found.clocks, found.without_ucx) == ({}, {0: 0.25}, {0: {"10.0.0.2": "no device"}})
    assert [(one.on_device, one.seconds, one.error) for one in found.transfers] == [(True, 0.5, "")] * 2


def test_rounds_without_kernels(rounds: Callable[..., Evidence]) -> None:
    found = rounds(kernel=False, receive=lambda name: Received(0.5, False, False))
    differ = "the received data differ from the sent data"
    assert kinds(found) == {}
    assert [(one.on_device, one.error) for one in found.transfers] == [(False, differ)] * 2


@pytest.mark.parametrize(
    ("result", "why"), [(None, "no result within 12 s"), (ValueError("killed"), "ValueError: killed")]
)
def test_rounds_without_a_worker_that_has_died(
    rounds: Callable[..., Evidence], result: Any, why: str
) -> None:
    """One that does not inspect its node, or never ends: tests/mpi/test_check.py."""
    found = rounds(run_kernel=lambda name: {"GPU-h1-0": KernelResult()} if name == "0-0" else result)
    assert kinds(found) == {"GPU-h1-0": "", "GPU-h1-1": "died"}
    assert found.kernels["GPU-h1-1"].text == f"the worker's process has ended or hangs: {why}"
    assert found.transfers == ()  # the other has no neighbour
    assert found.clocks == {0: 0.25}


def test_transfers_that_do_not_end(rounds: Callable[..., Evidence]) -> None:
    found = rounds(receive=lambda name: None if name == "0-0" else ValueError("broken"))
    assert [one.error for one in found.transfers] == ["ValueError: broken", "no result within 13 s"]
