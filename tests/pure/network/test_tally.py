"""What happens again and again is one line a minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dask_gpu_mpi.network import listeners
from dask_gpu_mpi.network.listeners import PERIOD, Tally


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self._waiting.append((self.now + seconds, function))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [each for each in self._waiting if each[0] <= self.now]:
            self._waiting.remove(due)
            due[1]()


@pytest.fixture
def flood() -> tuple[Tally, Clock, list[str]]:
    lines: list[str] = []
    clock = Clock()
    return Tally(lines.append, clock.later, lambda: clock.now), clock, lines


Flood = tuple[Tally, Clock, list[str]]


def test_a_flood_is_one_line_a_minute(flood: Flood) -> None:
    tallied, clock, lines = flood
    for _ in range(3 * 60 * 8):
        tallied.add("no handshake", "10.0.0.5")
        clock.sleep(0.125)
    assert lines[:2] == [
        "no handshake",
        "479 more of this kind in 60 s (479 from 10.0.0.5); the last: no handshake",
    ]
    assert lines[2].startswith("480 more")
    clock.sleep(PERIOD)
    assert len(lines) == 4  # what was left of it
    clock.sleep(10 * PERIOD)
    assert len(lines) == 4
    tallied.add("no handshake", "10.0.0.5")
    assert lines[4:] == ["no handshake"]


def test_once_in_a_while_is_a_line_each(flood: Flood) -> None:
    tallied, clock, lines = flood
    for number in range(3):
        tallied.add(f"the {number}", "h")
        clock.sleep(PERIOD)
    assert lines == ["the 0", "the 1", "the 2"]


def test_sources_are_named_and_bounded(flood: Flood, monkeypatch: pytest.MonkeyPatch) -> None:
    tallied, clock, lines = flood
    monkeypatch.setattr(listeners, "MOST_SOURCES", 5)
    for number in range(100):
        tallied.add("x", f"h{number}")
    clock.sleep(PERIOD)
    assert lines[1] == (
        "99 more of this kind in 60 s (94 from others, 1 from h1, 1 from h2, the others from 3 more); the last: x"
    )
