"""However a start ends on one rank: its agent is ended, and no other rank waits for it."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.startup import start_context
from dask_gpu_mpi.startup.messages import PAYLOADS
from dask_gpu_mpi.startup.start_context import Patience, StartContext
from support.mocks.starts import start_context as context


class Agent:
    closed: float | None = None

    def __init__(self) -> None:
        self.orders: list[str] = []

    def send(self, order: str) -> None:
        self.orders.append(order)

    def close(self, timeout: float) -> None:
        self.closed = timeout


def test_a_signal_is_a_failure_with_its_exit_code() -> None:
    context().raise_signal()
    assert context().signal_failure() is None
    with pytest.raises(StartupError, match="^SIGINT came while the cluster started$") as caught:
        context(signal=2).raise_signal()
    assert caught.value.exit_code == 130


def test_the_environment_is_not_shown() -> None:
    assert "SECRET" not in repr(context(SECRET="x"))


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


@pytest.mark.parametrize(("size", "met"), [(1, False), (2, True)])
@pytest.mark.parametrize("given", [False, True])
def test_the_ranks_meet(size: int, met: bool, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        start_context, "Mailbox", lambda *args, **_: calls.append(args) or SimpleNamespace(rank=0, size=size)
    )
    mpi = SimpleNamespace(COMM_WORLD="world")
    monkeypatch.setattr(start_context, "load_mpi", lambda environ, host: mpi)
    around = context()
    around.payloads = {"later": int}
    if given:
        around.comm = "mine"
    agent: Any = Agent()
    with around.ending_in_order(None):
        channels = around.meet(agent)
    payloads = {**PAYLOADS, "later": int}
    assert calls == [("mine" if given else "world", around.host, around.deadline, payloads)]
    assert (channels.size, channels.agent, around._has_met) == (size, agent, met)
    assert agent.orders == [Order.JOINED]
    with around.ending_in_order(None):
        assert around.meet(None).agent is None


def test_an_interrupted_start_of_the_user_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpu_mpi.startup.start_context.abort", lambda code: pytest.fail("aborted"))
    around = context()
    around._has_met = True
    with pytest.raises(KeyboardInterrupt), around.ending_in_order(None):
        raise KeyboardInterrupt


class Hanging:
    """A rank 0 whose main thread may hang, and the end of its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.aborts: list[int] = []
        self.ended = threading.Event()
        self.codes: list[int] = []
        self.size = size
        monkeypatch.setattr(start_context, "abort", self.aborts.append)
        monkeypatch.setattr(start_context, "ALIVE", 0.05)
        monkeypatch.setattr(os, "_exit", self._exit)
        monkeypatch.setattr(start_context, "Mailbox", lambda *_, **__: self)
        mpi = SimpleNamespace(COMM_WORLD="world")
        monkeypatch.setattr(start_context, "load_mpi", lambda environ, host: mpi)
        self.rank = 0
        self.context = context()
        self.context.deadline = self.context.started - 1
        self.context.patience = Patience(watchdog=1.0)

    def _exit(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    def send(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("size", [1, 2])
def test_rank_0_that_hangs_is_reported_with_its_last_step(
    size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Hanging(monkeypatch, size)
    with job.context.ending_in_order(None):
        channels = job.context.meet(None)
        channels.begin_step("inspecting the local directory '/gone'")
        assert job.ended.wait(10)
    assert (job.aborts, job.codes) == ([1] if size == 2 else [], [1])
    assert (
        f"rank 0 of {size} on {job.context.host}: no response before the start-up timeout (startup_timeout); last step: "
        "inspecting the local directory '/gone'. Fix: "
    ) in capsys.readouterr().err


def test_a_command_has_a_report_of_its_own_for_a_rank_0_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Hanging(monkeypatch)
    job.context.report_hanging = lambda channels: 7
    with job.context.ending_in_order(None):
        job.context.meet(None)
        assert job.ended.wait(10)
    assert (job.aborts, job.codes) == ([7], [7])


def test_the_watchdog_ends_with_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Hanging(monkeypatch)
    job.context.deadline += 60
    before = set(threading.enumerate())
    with job.context.ending_in_order(None):
        job.context.meet(None)
        (watchdog,) = set(threading.enumerate()) - before
    watchdog.join(10)
    assert not watchdog.is_alive()
    assert job.codes == []


def test_only_rank_0_watches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Hanging(monkeypatch)
    job.rank = 1
    before = set(threading.enumerate())
    job.context.meet(None)
    assert set(threading.enumerate()) <= before


def test_rank_0_that_minds_its_messages_after_the_deadline_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped for a while, with all other ranks, and goes on."""
    job = Hanging(monkeypatch)
    beats = itertools.count()
    enough = threading.Event()

    def look(_: StartContext) -> int:
        beat = next(beats)
        if beat > 20:
            enough.set()
        return beat

    monkeypatch.setattr(StartContext, "beats", property(look))
    monkeypatch.setattr(start_context, "ALIVE", 0.001)
    with job.context.ending_in_order(None):
        job.context.meet(None)
        assert enough.wait(10)
    assert job.codes == []
