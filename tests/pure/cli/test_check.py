"""The command ``check``, without MPI; with it: tests/mpi/test_check.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from dask_gpu_mpi.check import run as module
from dask_gpu_mpi.check.report import Evidence, Finding, Report
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import OptionError

REPORT = Report(Evidence(2), (Finding("error", "GPUs", "no GPU", "reset it"),))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command; what `run_check` was given is its `given`."""

    def run(*arguments: str, raises: Exception | None = None) -> Any:
        made = Mock(side_effect=raises or (lambda *_, show, **__: show(REPORT) or REPORT.exit_code))
        monkeypatch.setattr(module, "run_check", made)
        done = CliRunner().invoke(cli, ["check", *arguments])
        done.given = made.call_args  # type: ignore[attr-defined]
        return done

    return run


def test_an_error_is_reported_once(check: Callable[..., Any]) -> None:
    done = check(raises=OptionError("--nthreads: invalid"))
    assert (done.exit_code, done.stderr) == (2, "dask_gpu_mpi: error: --nthreads: invalid\n")
    assert check(raises=OptionError("--nthreads: invalid", reported=True)).stderr == ""
    assert isinstance(check("--nthreads", "x").given.args[0], OptionError)


@pytest.mark.parametrize("terminal", [True, False])
def test_colours_are_for_a_terminal(
    check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Whether standard error is one: under Open MPI standard output always is."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(
        "click.testing._NamedTextIOWrapper.isatty",
        lambda stream: terminal or stream.name == "<stdout>",
        raising=False,
    )
    assert ("\x1b[31mERROR" in check().output) == terminal
