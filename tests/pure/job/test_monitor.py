"""What the thread beside a script does, one event at a time, and who hears that the job's time runs out.

With real jobs: tests/faults.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signals import LOST, Action, install
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import monitor as module
from dask_gpu_mpi.job.monitor import Monitor, Walltime


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    numbers: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: numbers.append(number))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, LOST)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def pass_on(number: int) -> None:
    member: Any = SimpleNamespace(signal_relay=SimpleNamespace(for_script=number))
    walltime: Any = None
    Monitor(member, walltime)._pass_on_signal(number)
    assert member.signal_relay.for_script is None


def test_a_signal_is_passed_on_whose_handler_is_ours_or_pythons(sent: list[int]) -> None:
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


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None])
def test_a_signal_that_the_script_handles_or_ignores(handler: Any, sent: list[int]) -> None:
    signal.signal(signal.SIGTERM, handler)
    pass_on(signal.SIGTERM)
    assert sent == []


def test_failure_at_the_end_is_nobodys(sent: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(timeout: float) -> None:
        monitor.stop()
        raise OSError("broken pipe")

    member: Any = SimpleNamespace(pump=fail)
    monitor = Monitor(member, member)
    monitor._run()
    assert sent == []
    assert capsys.readouterr().err == ""


@pytest.fixture
def signals() -> Iterator[None]:
    """What SIGTERM and SIGUSR2 do is as it was afterwards."""
    actions = [Action.now(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    yield
    for action in actions:
        action.restore()


@pytest.mark.usefixtures("signals")
def test_another_thread_can_not_replace_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    walltime = Walltime({}, None, lambda *_: None)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            walltime.call_back(print, 30.0)
        except InputError as error:
            errors.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=call, name="mine")
        thread.start()
        thread.join()

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    in_a_thread()
    assert "called in the thread 'mine', while SIGTERM has another handler" in str(errors[0])
    walltime.call_back(print, 30.0)
    in_a_thread()
    assert len(errors) == 1


class Clock:
    """Seconds since the epoch, the end of the job, and the signals that this process was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: float | None = 1000.0) -> None:
        self.now = 900.0
        self.asked = 0
        self.sent: list[tuple[int, int]] = []
        self._end = end
        monkeypatch.setattr(module, "end_time", self._end_time)
        monkeypatch.setattr(module.time, "time", lambda: self.now)
        monkeypatch.setattr(module.os, "kill", lambda *what: self.sent.append(what))

    def _end_time(self, environ: Any) -> float | None:
        self.asked += 1
        return self._end


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("end", [1000.0, None])
def test_the_time_that_is_left(end: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is queried once. Without an end there is no signal."""
    clock = Clock(monkeypatch, end)
    walltime = Walltime({}, None, lambda *_: None)
    for clock.now, left in ((900.0, 100.0), (999.5, 0.5), (1001.0, 0.0)):
        assert walltime.time_left() == (left if end else None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert (clock.asked, bool(clock.sent)) == (1, end is not None)


@pytest.mark.usefixtures("signals")
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


@pytest.mark.usefixtures("signals")
def test_the_signal_comes_in_time_and_the_callback_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls: list[str] = []
    walltime = Walltime({}, None, lambda *_: None)
    assert not walltime.run_callback(signal.SIGTERM, None)
    clock.now = 2000.0
    walltime.check()  # nobody has asked for it
    clock.now = 900.0
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    assert clock.asked == 1
    clock.now = 970.0
    walltime.check()
    assert clock.sent == []
    clock.now = 970.5
    for _ in range(2):
        walltime.check()
    assert clock.sent == [(os.getpid(), signal.SIGTERM)]
    assert [walltime.run_callback(signal.SIGTERM, None) for _ in range(2)] == [True, False]
    assert calls == ["checkpoint"]


@pytest.mark.usefixtures("signals")
def test_a_handler_that_replaces_ours_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(monkeypatch)
    walltime = Walltime({}, "USR2", lambda *_: None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    for _ in range(2):
        walltime.check()
    assert capsys.readouterr().err.count("warning: on_walltime: SIGUSR2 got another handler") == 1
