"""Nannies: what is changed of them before they start, and when they no longer restart a worker that dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
from distributed.diagnostics.plugin import NannyPlugin

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.workers import factory
from dask_gpu_mpi.workers.factory import (
    DEATHS,
    WINDOW,
    closing_reason,
    listen_on_tcp,
    measure_less,
    watch_nanny,
)


class Nanny:
    """One whose worker's processes have these lives: seconds, each with the seconds without a process before it."""

    def __init__(self, lives: Iterable[tuple[float, float]], *, restarted: bool = False) -> None:
        self.now = 0.0
        self.handlers: dict[str, Any] = {"kill": self.kill}
        #: Whether each process ends because somebody has asked for it.
        self.restarted = restarted
        self.closed: str | None = None
        self.status = distributed.core.Status.running
        self._spans: list[tuple[float, float]] = []
        at = 0.0
        for gap, life in lives:
            self._spans.append((at + gap, at + gap + life))
            at += gap + life

    @property
    def pid(self) -> int | None:
        return next((i for i, (born, died) in enumerate(self._spans, 1) if born <= self.now < died), None)

    def clock(self) -> float:
        return self.now

    async def close(self, *, reason: str = "") -> str:
        self.closed = reason
        return "OK"

    async def kill(self, *, reason: str = "") -> None:
        assert reason == "restart"


def watch(
    nanny: Nanny,
    monkeypatch: pytest.MonkeyPatch,
    until: float = 1000.0,
    on_death: Any = lambda pid, code: None,
) -> str | None:
    """What the watch says; None when it is still watching at that time."""

    class Over(Exception):
        pass

    async def sleep(seconds: float) -> None:
        if nanny.restarted:
            await nanny.handlers["kill"](reason="restart")
        nanny.now += seconds
        if nanny.now > until:
            raise Over

    monkeypatch.setattr(factory.asyncio, "sleep", sleep)
    try:
        return asyncio.run(watch_nanny(nanny, nanny.clock, on_death=on_death))
    except Over:
        return None


class Hangs(NannyPlugin):
    def __init__(self) -> None:
        self.torn_down = 0

    async def teardown(self, nanny: Any) -> None:
        self.torn_down += 1
        await asyncio.Event().wait()


def test_a_plugin_whose_teardown_hangs_does_not_keep_its_nanny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker that dies again and again would never be removed, and its deaths no longer be counted."""
    monkeypatch.setattr(factory, "DASK_CLOSES", 0.2)
    monkeypatch.setattr(factory, "CLOSING_SLACK", 1.0)

    async def run() -> None:
        address = "tcp://127.0.0.1:0"
        async with distributed.Scheduler(host=address, dashboard_address="127.0.0.1:0") as scheduler:
            nanny: Any = distributed.Nanny(scheduler.address, nthreads=1, dashboard_address="127.0.0.1:0")
            reason = closing_reason(nanny)
            await nanny
            nanny.plugins["hangs"] = hangs = Hangs()
            pid = nanny.pid
            for _ in range(2):  # it may be closed for more than one reason
                assert await nanny.close(reason="nanny-instantiate-too-often") == "OK"
            await nanny.finished()
            assert (reason(), hangs.torn_down) == ("nanny-instantiate-too-often", 1)
            assert nanny.pid is None
            assert not os.path.exists(f"/proc/{pid}")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_nanny_that_closes_since_its_worker_has_left_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It closes in a task of its own then, and a server that closes cancels all its tasks but the one that closes it."""

    async def run() -> None:
        address = "tcp://127.0.0.1:0"
        async with distributed.Scheduler(host=address, dashboard_address="127.0.0.1:0") as scheduler:
            nanny: Any = distributed.Nanny(scheduler.address, nthreads=1, dashboard_address="127.0.0.1:0")
            reason = closing_reason(nanny)
            await nanny
            nanny.close_gracefully()
            os.kill(nanny.pid, signal.SIGKILL)
            await nanny.finished()
            assert reason() == "nanny-close-gracefully"

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert [each for each in caplog.records if each.name == "distributed.nanny"] == []


@pytest.mark.parametrize("gap", [0.0, 1.0])
@pytest.mark.parametrize("life", [2.0, 11.0, 20.0])
def test_deaths_within_the_window(life: float, gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    nanny = Nanny([(0, life)] + [(gap, life)] * 20)
    said = watch(nanny, monkeypatch)
    assert said == f"its process died {DEATHS} times within {(DEATHS - 1) * (gap + life):.0f} s"
    assert nanny.closed == "nanny-instantiate-too-often"
    assert nanny.now < (life + gap) * DEATHS + 1


def test_five_deaths_within_two_minutes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/exit-codes.md says."""
    assert watch(Nanny([(0, 30.0)] * 20), monkeypatch) == "its process died 5 times within 120 s"
    assert watch(Nanny([(0, 30.25)] * 20), monkeypatch, until=600) is None
    assert watch(Nanny([(0, 2.0)] * 4 + [(0, 10_000.0)]), monkeypatch, until=600) is None


def test_a_long_life_forgives(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [(0.5, 2.0)] * (DEATHS - 1)
    nanny = Nanny([*some, (0.5, WINDOW + 5), *some[1:], (0.5, 10_000.0)])
    assert watch(nanny, monkeypatch) is None


def test_restarts_that_somebody_asked_for_are_no_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(Nanny([(0.5, 2.0)] * 100, restarted=True), monkeypatch, until=200) is None


@pytest.mark.parametrize(("lifetime", "code", "dies"), [("2 s", 0, False), ("2 s", 1, True), (None, 0, True)])
def test_the_end_of_a_workers_lifetime_is_no_death(
    lifetime: str | None, code: int, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nanny: Any = Nanny([(0.5, 2.0)] * 100)
    nanny.worker_kwargs = {"lifetime": lifetime, "lifetime_restart": True}
    nanny.process = SimpleNamespace(process=SimpleNamespace(exitcode=code))
    assert (watch(nanny, monkeypatch, until=200) is not None) is dies


def test_closing_reason() -> None:
    nanny: Any = Nanny([])
    reason = closing_reason(nanny)
    assert reason() == ""
    assert asyncio.run(nanny.close(reason="nanny-instantiate-failed")) == "OK"
    asyncio.run(nanny.close(reason="nanny-close"))
    assert reason() == "nanny-instantiate-failed"  # the first counts


def test_an_agent_that_cannot_be_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", full)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="memory"):
        AgentProcess({})
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_each_death_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int | None]] = []
    nanny = Nanny([(0.0, 10.0), (1.0, 20.0), (1.0, 2_000.0)])
    of = {1: -9, 2: 3, 3: None}
    process = lambda nanny: None if nanny.pid is None else SimpleNamespace(exitcode=of[nanny.pid])  # noqa: E731
    monkeypatch.setattr(factory, "_process", process)
    assert watch(nanny, monkeypatch, until=100, on_death=lambda pid, code: told.append((pid, code))) is None
    assert told == [(1, -9), (2, 3)]


@pytest.mark.parametrize("status", ["closing_gracefully", "closing", "closed"])
def test_a_worker_that_closes_has_not_died(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """One that is retired: its nanny has no connection any more to tell of it, and would log a traceback."""
    nanny = Nanny([(0.0, 10.0), (1.0, 2_000.0)])
    nanny.status = distributed.core.Status[status]
    watch(nanny, monkeypatch, until=100, on_death=lambda pid, code: pytest.fail(f"told of {pid}"))


def test_a_server_that_measures_less_runs_and_keeps_its_other_callbacks() -> None:
    from distributed.core import Server

    async def look() -> tuple[set[str], list[bool]]:
        server = Server({})
        before = set(server.periodic_callbacks)
        measure_less(server)
        await server
        server.start_periodic_callbacks()
        running = [callback.is_running() for callback in server.periodic_callbacks.values()]
        gone = before - set(server.periodic_callbacks)
        await server.close()
        return gone, running

    gone, running = asyncio.run(look())
    assert gone == {"tick", "ticks", "monitor"}
    assert running == [True]


def test_a_nanny_goes_on_looking_at_its_worker() -> None:
    nanny = distributed.Nanny("tcp://127.0.0.1:1", host="127.0.0.1", nthreads=1, memory_limit="1 GiB")
    measure_less(nanny)
    assert "memory_monitor" in nanny.periodic_callbacks


@pytest.mark.parametrize(("protocol", "listens"), [("ucx", "tcp"), ("tls", "tls"), ("tcp", "tcp")])
def test_nannies_of_workers_over_ucx_listen_on_tcp(protocol: str, listens: str) -> None:
    nanny = distributed.Nanny(f"{protocol}://127.0.0.1:1", protocol=protocol, host="127.0.0.1", nthreads=1)
    listen_on_tcp(nanny)
    assert nanny._protocol == listens
    assert nanny.worker_kwargs["protocol"] == protocol
