"""Nannies: what their subclass records and leaves out, and when they no longer restart a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import distributed
import pytest
from distributed.core import Status

from dask_gpu_mpi.workers import lifecycle
from dask_gpu_mpi.workers.factory import WatchedNanny, watched
from dask_gpu_mpi.workers.lifecycle import WINDOW, watch_nanny


class Nanny:
    """One whose worker's processes have these lives: seconds, each with the seconds without a process before it."""

    def __init__(self, lives: Iterable[tuple[float, float]], *, restarted: bool = False) -> None:
        self.now = 0.0
        self.requested_ends: set[int | None] = set()
        self.has_lifetime = False
        #: Whether each process ends because somebody has asked for it.
        self.restarted = restarted
        self.closed: str | None = None
        self.status = Status.running
        #: By process id.
        self.exit_codes: dict[int, int | None] = {}
        self._spans: list[tuple[float, float]] = []
        at = 0.0
        for gap, life in lives:
            self._spans.append((at + gap, at + gap + life))
            at += gap + life

    @property
    def pid(self) -> int | None:
        return next((i for i, (born, died) in enumerate(self._spans, 1) if born <= self.now < died), None)

    @property
    def process(self) -> Any:
        if self.pid is None:
            return None
        return SimpleNamespace(process=SimpleNamespace(exitcode=self.exit_codes.get(self.pid)))

    async def close(self, *, reason: str = "") -> str:
        self.closed = reason
        return "OK"


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
            nanny.requested_ends.add(nanny.pid)
        nanny.now += seconds
        if nanny.now > until:
            raise Over

    monkeypatch.setattr(lifecycle.asyncio, "sleep", sleep)
    try:
        return asyncio.run(watch_nanny(nanny, lambda: nanny.now, on_death=on_death))
    except Over:
        return None


@pytest.mark.parametrize(
    ("lives", "restarted", "seconds"),
    [
        ([(0.0, 2.0)] * 20, False, 8),
        ([(0.0, 11.0)] + [(1.0, 11.0)] * 20, False, 48),
        ([(0.0, 30.0)] * 20, False, 120),  # as docs/exit-codes.md says
        ([(0.0, 30.25)] * 20, False, None),
        ([(0.0, 2.0)] * 4 + [(0.0, 10_000.0)], False, None),
        ([*[(0.5, 2.0)] * 4, (0.5, WINDOW + 5), *[(0.5, 2.0)] * 3, (0.5, 10_000.0)], False, None),
        ([(0.5, 2.0)] * 400, True, None),
    ],
    ids=["quick", "slow", "just within", "just not", "four", "a long life between", "restarts asked for"],
)
def test_five_deaths_within_two_minutes(
    lives: list[tuple[float, float]], restarted: bool, seconds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nanny = Nanny(lives, restarted=restarted)
    said = watch(nanny, monkeypatch, until=600.0)
    if seconds is None:
        assert (said, nanny.closed) == (None, None)
    else:
        assert said == f"its process died 5 times within {seconds} s"
        assert nanny.closed == "nanny-instantiate-too-often"
        assert nanny.now < lives[0][1] + seconds + 1


@pytest.mark.parametrize(
    ("lifetime", "status", "deaths"),
    [
        # a worker with a lifetime ends with exit code 0; of another one that is a death: a task may have called exit(0)
        (True, Status.running, [(1, -9), (2, 3), (4, None)]),
        (False, Status.running, [(1, -9), (2, 3), (3, 0), (4, None)]),
        # one that is retired: its nanny has no connection any more to tell of it, and would log a traceback
        *((False, status, []) for status in (Status.closing_gracefully, Status.closing, Status.closed)),
    ],
)
def test_each_death_is_told(
    lifetime: bool, status: Status, deaths: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int | None]] = []
    nanny = Nanny([(0.0, 10.0), (1.0, 10.0), (1.0, 10.0), (1.0, 10.0), (1.0, 2_000.0)])
    nanny.exit_codes = {1: -9, 2: 3, 3: 0, 4: None}
    nanny.has_lifetime, nanny.status = lifetime, status
    assert watch(nanny, monkeypatch, until=100, on_death=lambda pid, code: told.append((pid, code))) is None
    assert told == deaths


#: Servers of distributed that are cancelled in the middle of a handshake leave the socket to the garbage collector.
REAL = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@contextlib.asynccontextmanager
async def real_nanny() -> AsyncIterator[Any]:
    """One that has a worker."""
    own = "127.0.0.1:0"
    async with distributed.Scheduler(host=f"tcp://{own}", dashboard_address=own) as scheduler:
        nanny: Any = WatchedNanny(scheduler.address, nthreads=1, dashboard_address=own)
        await nanny
        try:
            yield nanny
        finally:
            await nanny.close(reason="the test is over")
    gc.collect()  # here, where `REAL` ignores what it finds


@REAL
async def test_a_real_nanny_closes_without_an_error_since_its_worker_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It closes in a task of its own then, and a server that closes cancels all its tasks but the one that closes it."""
    with caplog.at_level(logging.ERROR):
        async with real_nanny() as nanny:
            assert nanny.closed_for is None
            nanny.close_gracefully()
            os.kill(nanny.pid, signal.SIGKILL)
            await nanny.finished()
            await nanny.close(reason="nanny-close")
            assert nanny.closed_for == "nanny-close-gracefully"  # the first reason
    assert [each for each in caplog.records if each.name == "distributed.nanny"] == []


class Mine(distributed.Nanny):
    """A user's class that never calls `super()`, and whose constructor does not accept everything."""

    def __init__(self, scheduler: str, lifetime: str | None = None) -> None:
        distributed.Nanny.__init__(self, scheduler, host="127.0.0.1", nthreads=1, lifetime=lifetime)
        self.killed_for: list[str] = []

    async def kill(self, timeout: float = 5, reason: str = "") -> None:
        self.killed_for.append(reason)

    async def close(self, timeout: float = 5, reason: str = "") -> str:  # type: ignore[override]
        return "closed"


def make_mine(lifetime: str | None = None) -> Any:
    return watched(Mine)("tcp://127.0.0.1:1", lifetime=lifetime)


@pytest.mark.parametrize("by", ["method", "handler"])
async def test_an_end_that_was_requested_is_recorded_and_a_lifetime(by: str) -> None:
    nanny = make_mine()
    assert isinstance(nanny, Mine)
    assert not nanny.has_lifetime
    await (nanny.handlers["kill"] if by == "handler" else nanny.kill)(reason="restart")
    assert (nanny.requested_ends, nanny.killed_for) == ({None}, ["restart"])
    assert await nanny.close(reason="the first") == await nanny.close(reason="later") == "closed"
    assert nanny.closed_for == "the first"
    assert make_mine(lifetime="1h").has_lifetime
    with dask.config.set({"distributed.worker.lifetime.duration": "1h"}):
        assert make_mine().has_lifetime


@REAL
async def test_a_worker_is_restarted_in_a_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with real_nanny() as nanny:
        folder = tmp_path / "deleted"
        folder.mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        assert await nanny.instantiate() == distributed.core.Status.running
        assert os.getcwd() == "/"
