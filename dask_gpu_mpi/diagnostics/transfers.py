"""Data between workers, added up by sender and receiver; where there are too many pairs of workers, by node."""

from __future__ import annotations

from typing import Any

__all__ = ["MOST_PAIRS", "Transfers"]

#: Pairs that are kept.
MOST_PAIRS = 20_000


class Transfers:
    """The sums.

    Examples
    --------
    >>> transfers = Transfers(most=1)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 100, 0.5)
    >>> transfers.add(("0-0", "a"), ("1-0", "b"), 50, 0.5)
    >>> transfers.as_rows()
    [['0-0', '1-0', 2, 150, 1.0]]
    >>> transfers.add(("0-0", "a"), ("1-1", "b"), 10, 0.5)
    >>> transfers.by, transfers.as_rows()
    ('node', [['a', 'b', 3, 160, 1.5]])
    """

    def __init__(self, most: int = MOST_PAIRS) -> None:
        #: Whether the pairs are workers or nodes: ``"worker"`` or ``"node"``.
        self.by = "worker"
        self._most = most
        #: By sender and receiver, each worker and node: number, bytes, seconds.
        self._pairs: dict[tuple[tuple[str, str], tuple[str, str]], list[float]] = {}

    def add(self, sender: tuple[str, str], receiver: tuple[str, str], size: int, seconds: float) -> None:
        """Add a transfer between two workers, each with its node."""
        self._add(sender, receiver, 1, size, seconds)
        if len(self._pairs) > self._most and self.by == "worker":
            self.by = "node"
            pairs, self._pairs = self._pairs, {}
            for (one, other), (number, bytes_, seconds_) in pairs.items():
                self._add(one, other, number, bytes_, seconds_)

    def _add(
        self, sender: tuple[str, str], receiver: tuple[str, str], number: float, size: float, seconds: float
    ) -> None:
        if self.by == "node":
            sender, receiver = (sender[1], sender[1]), (receiver[1], receiver[1])
            if len(self._pairs) >= self._most and (sender, receiver) not in self._pairs:
                sender = receiver = ("other", "other")
        sums = self._pairs.setdefault((sender, receiver), [0, 0, 0.0])
        sums[0] += number
        sums[1] += size
        sums[2] += seconds

    def as_rows(self) -> list[list[Any]]:
        """Sender, receiver, number of transfers, bytes, seconds."""
        return [[sender[0], receiver[0], *sums] for (sender, receiver), sums in self._pairs.items()]
