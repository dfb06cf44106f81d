from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from dask_gpu_mpi import restarts
from dask_gpu_mpi.member import _Restarts
from dask_gpu_mpi.restarts import SHORT_LIFE, SHORT_LIVES, closing_reason, watch_nanny


class Nanny:
    """One whose worker's processes have these lives: seconds, each with the seconds without a process before it."""

    def __init__(self, lives: Iterable[tuple[float, float]]) -> None:
        self.now = 0.0
        self.closed: str | None = None
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


def watch(nanny: Nanny, monkeypatch: pytest.MonkeyPatch, until: float = 1000.0) -> str | None:
    """What the watch says; None when it is still watching at that time."""

    class Over(Exception):
        pass

    async def sleep(seconds: float) -> None:
        nanny.now += seconds
        if nanny.now > until:
            raise Over

    monkeypatch.setattr(restarts.asyncio, "sleep", sleep)
    try:
        return asyncio.run(watch_nanny(nanny, nanny.clock))
    except Over:
        return None


@pytest.mark.parametrize("gap", [0.0, 1.0])
def test_short_lives_in_a_row(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    nanny = Nanny([(0, 2)] + [(gap, 2)] * 20)
    said = watch(nanny, monkeypatch)
    assert said == f"its process died {SHORT_LIVES} times, each within {SHORT_LIFE:g} s of its start"
    assert nanny.closed == "nanny-instantiate-too-often"
    assert nanny.now < (2 + gap) * SHORT_LIVES + 1


def test_long_lives_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nanny = Nanny([(0, SHORT_LIFE + 1)] + [(0.5, SHORT_LIFE + 1)] * 200)
    assert watch(nanny, monkeypatch) is None
    assert nanny.closed is None


def test_a_long_life_forgives(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [(0.5, 2.0)] * (SHORT_LIVES - 1)
    nanny = Nanny([*some, (0.5, SHORT_LIFE + 5), *some, (0.5, 10_000.0)])
    assert watch(nanny, monkeypatch) is None


def test_a_worker_that_lives_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(Nanny([(0, 10_000)]), monkeypatch) is None


def test_closing_reason() -> None:
    nanny: Any = Nanny([])
    reason = closing_reason(nanny)
    assert reason() == ""
    assert asyncio.run(nanny.close(reason="nanny-instantiate-failed")) == "OK"
    asyncio.run(nanny.close(reason="nanny-close"))
    assert reason() == "nanny-instantiate-failed"  # the first counts


def test_an_agent_is_started_three_times_again() -> None:
    again = _Restarts()
    delays = [again.next_delay() for _ in range(5)]
    assert delays[3:] == [None, None]
    first = [delay for delay in delays[:3] if delay is not None]
    assert len(first) == 3
    assert first == sorted(first)
    assert first[0] > 0
