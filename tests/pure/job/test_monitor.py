"""What the thread beside a script does, one event at a time; with real jobs: tests/faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signals import LOST, install
from dask_gpu_mpi.job import monitor as module
from dask_gpu_mpi.job.monitor import Monitor


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


def test_a_signal_whose_handler_is_ours(sent: list[int]) -> None:
    install(signal.SIGTERM, lambda *_: None)
    pass_on(signal.SIGTERM)
    assert sent == [signal.SIGTERM]


def test_sigint_where_python_handles_it(sent: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pass_on(signal.SIGINT)
    assert sent == [signal.SIGINT]


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


class Watched:
    """A member and a walltime whose looks are counted; `on_look` makes something happen at one of them."""

    def __init__(self, on_look: Callable[[Watched], None]) -> None:
        self.ending = SimpleNamespace(lost=None, state=SimpleNamespace(over=False))
        self.signal_relay = SimpleNamespace(for_script=None)
        self.gone = False
        self.looks = self.checks = self.leaves = 0
        self.on_look = on_look
        self.dropped: list[float] = []
        self.channels = SimpleNamespace(drop_agent=self.dropped.append)
        self.joined = SimpleNamespace(options=SimpleNamespace(shutdown_timeout=3.0))
        member: Any = self
        self.monitor = Monitor(member, member)

    def pump(self, timeout: float) -> None:
        assert 0 < timeout <= 1
        self.looks += 1
        assert self.looks < 10
        self.on_look(self)

    def check(self) -> None:
        self.checks += 1

    def leave(self) -> None:
        self.leaves += 1

    def launcher_gone(self) -> bool:
        return self.gone

    def run(self) -> Watched:
        """Run until it ends, in this thread."""
        self.monitor._run()
        return self


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Exit codes instead of an end; nothing is waited for."""
    codes: list[object] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(module, "LOST_GRACE", 0.01)
    monkeypatch.setattr(module, "silence_dask", lambda: codes.append("silent"))
    return codes


def test_it_watches_until_it_is_stopped(sent: list[int], exits: list[object]) -> None:
    def look(watched: Watched) -> None:
        if watched.looks == 3:
            watched.monitor.stop()

    watched = Watched(look).run()
    assert (watched.looks, watched.checks, watched.leaves) == (3, 3, 0)
    assert sent == exits == []


def test_it_leaves_when_the_cluster_is_over(sent: list[int], exits: list[object]) -> None:
    def look(watched: Watched) -> None:
        watched.ending.state.over = watched.looks >= 2
        if watched.looks == 3:
            watched.monitor.stop()

    assert Watched(look).run().leaves == 2
    assert sent == exits == []


def test_signal_of_another_rank_is_passed_on_while_it_watches(sent: list[int], exits: list[object]) -> None:
    def look(watched: Watched) -> None:
        watched.signal_relay.for_script = signal.SIGTERM if watched.looks == 1 else None
        if watched.looks == 2:
            watched.monitor.stop()

    install(signal.SIGTERM, lambda *_: None)
    Watched(look).run()
    assert sent == [signal.SIGTERM]
    assert exits == []


@pytest.mark.parametrize("what", ["cluster", "launcher"])
def test_script_is_ended_when_it_has_lost(
    what: str, sent: list[int], exits: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def look(watched: Watched) -> None:
        if watched.looks == 2:
            watched.ending.lost = "the scheduler ended" if what == "cluster" else None
            watched.gone = what == "launcher"

    watched = Watched(look).run()
    assert watched.looks == 2
    assert sent == [signal.SIGTERM]
    assert exits == ["silent", 1]
    assert watched.dropped == [1.0]
    assert "script still running 0.01 s after the cluster was lost; terminating it" in capsys.readouterr().err


def test_a_handler_of_the_loss_is_called_and_not_that_of_sigterm(
    sent: list[int], exits: list[object]
) -> None:
    def look(watched: Watched) -> None:
        watched.ending.lost = "the scheduler ended"

    install(LOST, lambda *_: None)
    Watched(look).run()
    assert sent == [LOST]


def test_script_that_ends_in_time_is_not_ended_by_force(
    monkeypatch: pytest.MonkeyPatch, sent: list[int], exits: list[object]
) -> None:
    def look(watched: Watched) -> None:
        watched.gone = True
        monkeypatch.setattr(os, "kill", lambda pid, number: watched.monitor.stop())

    watched = Watched(look).run()
    assert exits == ["silent"]
    assert watched.dropped == []


@pytest.mark.parametrize("known", [None, "the scheduler ended"])
def test_failure_of_the_monitor_ends_the_script(
    known: str | None, sent: list[int], exits: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def look(watched: Watched) -> None:
        watched.ending.lost = known
        raise OSError("broken pipe")

    watched = Watched(look).run()
    assert watched.ending.lost == (known or "its monitor failed")
    assert sent == [signal.SIGTERM]
    assert "the monitor of the cluster failed: OSError: broken pipe" in capsys.readouterr().err


def test_failure_at_the_end_is_nobodys(
    sent: list[int], exits: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def look(watched: Watched) -> None:
        watched.monitor.stop()
        raise OSError("broken pipe")

    Watched(look).run()
    assert sent == exits == []
    assert capsys.readouterr().err == ""


def test_thread_is_waited_for_no_longer_than_the_shutdown() -> None:
    at_work, waits = threading.Event(), []

    def look(watched: Watched) -> None:
        at_work.set()
        watched.monitor._leaving.wait(5)

    watched = Watched(look)
    watched.monitor.start()
    assert at_work.wait(5)
    thread = watched.monitor._thread
    assert thread is not None
    assert thread.daemon
    watched.monitor.stop()
    assert not thread.is_alive()
    slow: Any = SimpleNamespace(join=lambda timeout: waits.append(timeout))
    watched.monitor._thread = slow
    watched.monitor.stop()
    assert waits == [8.0]
