"""However a start ends on one rank: its agent is ended, and no other rank waits for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.startup.start_context import StartContext


class Signals:
    def __init__(self, got: tuple[int, float] | None = None) -> None:
        self.got = got


class Agent:
    closed: float | None = None

    def close(self, timeout: float) -> None:
        self.closed = timeout


def context(signal: int | None = None) -> StartContext:
    now = time.monotonic()
    signals: Any = Signals(None if signal is None else (signal, now))
    return StartContext({"SECRET": "x"}, None, True, now, now + 30, signals, Timeline("rank"))


def test_a_signal_is_a_failure_with_its_exit_code() -> None:
    context().raise_signal()
    assert context().signal_failure() is None
    with pytest.raises(StartupError, match="^SIGINT came while the cluster started$") as caught:
        context(2).raise_signal()
    assert caught.value.exit_code == 130


def test_the_environment_is_not_shown() -> None:
    assert "SECRET" not in repr(context())


def test_an_error_that_is_fatal_aborts_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("dask_gpu_mpi.startup.start_context.abort", codes.append)
    error = StartupError("nobody there")
    error.fatal = True
    agent: Any = Agent()
    with pytest.raises(StartupError), context().ending_in_order(agent):
        raise error
    assert codes == [1]
    assert agent.closed == 1.0
    assert capsys.readouterr().err == "dask_gpu_mpi: error: nobody there\n"


@pytest.mark.parametrize("met", [True, False])
def test_a_defect_does_not_leave_other_ranks_waiting(met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("dask_gpu_mpi.startup.start_context.abort", codes.append)
    around = context()
    around._has_met = met
    with pytest.raises(ZeroDivisionError), around.ending_in_order(None):
        _ = 1 / 0
    with pytest.raises(InputError), around.ending_in_order(None):
        raise InputError("the others know")
    assert codes == ([1] if met else [])
