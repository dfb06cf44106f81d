"""A clock in place of `time`."""

from __future__ import annotations


class Clock:
    """`time`, which only a sleep, or the test, moves on."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
