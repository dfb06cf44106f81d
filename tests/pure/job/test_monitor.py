"""What the thread beside a script does, one event at a time, and who hears that the job's time runs out.

With real jobs: tests/faults.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dask_gpu_mpi.base.signals import install
from dask_gpu_mpi.job import monitor as module
from dask_gpu_mpi.job.monitor import Monitor, Walltime

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that this process would have been sent."""
    numbers: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        numbers.append(number)

    monkeypatch.setattr(os, "kill", kill)
    return numbers


def pass_on(number: int) -> None:
    member: Any = SimpleNamespace(signal_relay=SimpleNamespace(for_script=number))
    walltime: Any = None
    Monitor(member, walltime)._pass_on_signal(number)
    assert member.signal_relay.for_script is None


def test_a_signal_is_passed_on_whose_handler_is_ours_or_pythons(sent: list[int]) -> None:
    """But none that the script handles or ignores."""
    for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda *_: None):
        signal.signal(signal.SIGTERM, handler)
        pass_on(signal.SIGTERM)
    assert sent == []
    install(signal.SIGTERM, lambda *_: None)
    pass_on(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pass_on(signal.SIGINT)
    assert sent == [signal.SIGTERM, signal.SIGINT]


def test_sigint_that_the_script_has_had_itself(sent: list[int]) -> None:
    """A launcher tells all ranks of Ctrl-C; a second interrupt would cut the script's cleaning up short."""

    def fail(error: type[BaseException]) -> None:
        try:
            raise error
        finally:
            thread = threading.Thread(target=pass_on, args=(signal.SIGINT,))  # as the monitor is one
            thread.start()
            thread.join(10)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt)
    assert sent == []
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError)
    assert sent == [signal.SIGINT]


def test_failure_at_the_end_is_nobodys(sent: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(timeout: float) -> None:
        monitor.stop()
        raise OSError("broken pipe")

    member: Any = SimpleNamespace(pump=fail)
    monitor = Monitor(member, member)
    monitor._run()
    assert (sent, capsys.readouterr().err) == ([], "")


def test_another_thread_can_not_replace_a_handler(clock: Any) -> None:
    walltime = Walltime({}, None, lambda *_: None)

    def in_a_thread() -> str:
        with concurrent.futures.ThreadPoolExecutor(1, "mine") as pool:
            return str(pool.submit(walltime.call_back, print, 30.0).exception())

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert "called in the thread 'mine_0', while SIGTERM has another handler" in in_a_thread()
    walltime.call_back(print, 30.0)
    assert in_a_thread() == "None"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds since the epoch, the end of the job, and how often the batch system was queried for it."""
    clock = SimpleNamespace(now=900.0, end=1000.0, asked=0)

    def end_time(environ: Any) -> float | None:
        clock.asked += 1
        return clock.end

    monkeypatch.setattr(module, "end_time", end_time)
    monkeypatch.setattr(module.time, "time", lambda: clock.now)
    return clock


@pytest.mark.parametrize("end", [1000.0, None])
def test_the_time_that_is_left(end: float | None, clock: Any, sent: list[int]) -> None:
    """It is queried once. Without an end there is no signal."""
    clock.end = end
    walltime = Walltime({}, None, lambda *_: None)
    for clock.now, left in ((900.0, 100.0), (999.5, 0.5), (1001.0, 0.0)):
        assert walltime.time_left() == (left if end else None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert (clock.asked, bool(sent)) == (1, end is not None)


def test_a_monitor_without_a_thread_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of threads is an error of the script, after which the job ends in order."""
    nothing: Any = None
    monitor = Monitor(nothing, nothing)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="new thread"):
        monitor.start()
    monitor.stop()


def test_a_signal_during_the_query_of_the_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def query(environ: Any) -> float:
        walltime.check()  # the monitor does not wait for it
        walltime.run_callback(signal.SIGTERM, None)
        return 1000.0

    monkeypatch.setattr(module, "end_time", query)
    walltime = Walltime({}, None, lambda *_: None)
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    assert calls == ["checkpoint"]


def test_the_signal_comes_in_time_and_the_callback_runs_once(clock: Any, sent: list[int]) -> None:
    calls: list[str] = []
    walltime = Walltime({}, None, lambda *_: None)
    assert not walltime.run_callback(signal.SIGTERM, None)
    clock.now = 2000.0
    walltime.check()  # nobody has asked for it
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    for clock.now, times in ((970.0, 0), (970.5, 1), (971.0, 1)):
        walltime.check()
        assert sent == [signal.SIGTERM] * times
    assert [walltime.run_callback(signal.SIGTERM, None) for _ in range(2)] == [True, False]
    assert calls == ["checkpoint"]


@pytest.mark.usefixtures("clock")
def test_a_handler_that_replaces_ours_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    walltime = Walltime({}, "USR2", lambda *_: None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    for _ in range(2):
        walltime.check()
    assert capsys.readouterr().err.count("warning: on_walltime: SIGUSR2 got another handler") == 1
