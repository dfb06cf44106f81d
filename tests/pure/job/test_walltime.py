"""Who hears that the job's time is running out, and what it ends with."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signals import Action
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import client_end, outcome, start
from dask_gpu_mpi.job import monitor as walltime_module
from dask_gpu_mpi.job import session as session_module
from dask_gpu_mpi.job.ending import Ending
from dask_gpu_mpi.job.monitor import Walltime


def make_session(monkeypatch: pytest.MonkeyPatch) -> session_module.Session:
    """A session of a cluster that is not there."""
    monkeypatch.setattr(session_module, "_current", None)
    monkeypatch.setattr(client_end, "_current", None)
    cluster = SimpleNamespace(plan=object(), address="tls://nowhere", dashboard=None, config={})
    joined = SimpleNamespace(cluster=cluster, environ={}, options=SimpleNamespace(walltime_signal="USR2"))
    relay = SimpleNamespace(script_is_interrupted=lambda: None)
    member: Any = SimpleNamespace(joined=joined, signal_relay=relay, ending=Ending())
    return session_module.Session(client_end.ClientEnd(member, 0.0, start.on_signal))


@pytest.fixture
def signals() -> Iterator[None]:
    """What SIGTERM and SIGUSR2 do is as it was afterwards."""
    actions = [Action.now(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    yield
    for action in actions:
        action.restore()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_handler_that_was_there_comes_second_and_does_not_choose_the_code(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[Any] = []

    def own(number: int, _: Any) -> None:
        calls.append(number)
        raise SystemExit(0)

    signal.signal(number, own)
    make_session(monkeypatch).on_walltime(lambda: calls.append("callback"))
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    assert ended.value.code == outcome.WALLTIME
    assert calls == ["callback", number]
    signal.raise_signal(number)  # Slurm's second
    assert len(calls) == 2


@pytest.mark.usefixtures("signals")
def test_another_thread_can_not_replace_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(monkeypatch)
    errors: list[InputError] = []

    def call() -> None:
        try:
            session.on_walltime(print)
        except InputError as error:
            errors.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=call, name="mine")
        thread.start()
        thread.join()

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    in_a_thread()
    assert "called in the thread 'mine', while SIGTERM has another handler" in str(errors[0])
    session.on_walltime(print)
    in_a_thread()
    assert len(errors) == 1


class Clock:
    """Seconds since the epoch, the end of the job, and the signals that this process was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: float | None = 1000.0) -> None:
        self.now = 900.0
        self.asked = 0
        self.sent: list[tuple[int, int]] = []
        self._end = end
        monkeypatch.setattr(walltime_module, "end_time", self._end_time)
        monkeypatch.setattr(walltime_module.time, "time", lambda: self.now)
        monkeypatch.setattr(walltime_module.os, "kill", lambda *what: self.sent.append(what))

    def _end_time(self, environ: Any) -> float | None:
        self.asked += 1
        return self._end


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    walltime = Walltime({}, None, lambda *_: None)
    assert walltime.time_left() == 100.0
    clock.now = 999.5
    assert walltime.time_left() == 0.5
    clock.now = 1001.0
    assert walltime.time_left() == 0.0
    assert clock.asked == 1
    clock = Clock(monkeypatch, None)
    walltime = Walltime({}, None, lambda *_: None)
    assert walltime.time_left() is None
    assert walltime.time_left() is None
    assert clock.asked == 1


@pytest.mark.usefixtures("signals")
def test_the_signal_comes_in_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    walltime = Walltime({}, None, lambda *_: None)
    clock.now = 2000.0
    walltime.check()  # nobody has asked for it
    clock.now = 900.0
    walltime.call_back(print, 30.0)
    assert clock.asked == 1
    clock.now = 970.0
    walltime.check()
    assert clock.sent == []
    clock.now = 970.5
    for _ in range(2):
        walltime.check()
    assert clock.sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.usefixtures("signals")
def test_without_an_end_there_is_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, None)
    walltime = Walltime({}, None, lambda *_: None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert clock.sent == []


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


@pytest.mark.usefixtures("signals")
def test_the_callback_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    calls: list[str] = []
    walltime = Walltime({}, None, lambda *_: None)
    assert not walltime.run_callback(signal.SIGTERM, None)
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    assert walltime.run_callback(signal.SIGTERM, None)
    assert not walltime.run_callback(signal.SIGTERM, None)
    assert calls == ["checkpoint"]
