"""The hook for uncaught errors: installed with a cluster, and given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, SpmdError
from dask_gpu_mpi.job import outcome


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """What the hook that was there before is given."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    yield found
    outcome.retire()


def report(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_errors_of_ours_are_one_line(seen: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook
    outcome.install(lambda: None)
    outcome.install(lambda: None)  # once is enough
    with pytest.raises(SystemExit) as end:
        report(InputError("no such thing"))
    assert end.value.code == 2
    with pytest.raises(SystemExit):
        report(InputError("told already", reported=True))
    assert capsys.readouterr().err == "dask_gpu_mpi: error: no such thing\n"
    other = ValueError("x")
    report(other)
    assert seen == [other]
    outcome.retire()
    assert sys.excepthook is before


def test_what_a_gangs_function_raises_has_its_traceback(
    seen: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome.install(lambda: None)
    error = SpmdError("spmd: rank 0 raised ValueError()")
    report(error)
    assert seen == [error]
    assert capsys.readouterr().err == ""


def test_a_hook_around_ours_stays_and_runs_once(
    seen: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome.install(lambda: "rank 1 failed:")
    inner, wrapped = sys.excepthook, []

    def around(*args: Any) -> None:
        wrapped.append(args[1])
        inner(*args)

    sys.excepthook = around
    outcome.retire()
    assert sys.excepthook is around
    error = ValueError("x")
    report(error)
    assert (wrapped, seen) == ([error], [error])
    assert capsys.readouterr().err == ""
    for _ in range(2):  # further clusters, of which the last is still there
        outcome.install(lambda: "rank 1 failed:")
    report(error)
    assert (wrapped, seen) == ([error] * 2, [error] * 2)
    assert capsys.readouterr().err == "dask_gpu_mpi: rank 1 failed:\n"


def test_a_library_that_finds_mpis_ucx_gets_a_line_before_its_traceback(
    seen: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome.install(lambda: None)
    error = ImportError("libuct.so: undefined symbol: ucs_ifname_to_ndev_index")
    report(error)
    assert seen == [error]
    assert "Fix: call initialize() before mpi4py is imported" in capsys.readouterr().err
    report(ImportError("no module named cudf"))
    assert capsys.readouterr().err == ""
