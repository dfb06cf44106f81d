"""Which gang has which workers: all that it asks for at once, in the order of asking."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Leases"]


class Leases:
    """Sets of workers, each leased to one gang at a time.

    A gang holds all of its workers or none, and one that waits is passed by those alone that share no worker with it. So two
    gangs never wait for each other, and none waits for ever.

    Examples
    --------
    >>> leases = Leases()
    >>> leases.ask("first", ["a", "b"]), leases.ask("second", ["b", "c"]), leases.ask("third", ["c"])
    (['first'], [], [])
    >>> leases.ask("fourth", ["d"])
    ['fourth']
    >>> leases.release("first")
    ['second']
    """

    def __init__(self) -> None:
        #: In the order of asking.
        self._wanted: dict[str, frozenset[str]] = {}
        self._granted: set[str] = set()

    def ask(self, gang: str, workers: Iterable[str]) -> list[str]:
        """A gang asks for workers; returns the gangs that are granted theirs by this: it, or none."""
        if gang in self._wanted:
            raise ValueError(f"gang {gang} has asked already")
        self._wanted[gang] = frozenset(workers)
        return self._grant()

    def release(self, gang: str) -> list[str]:
        """A gang gives back what it has, or asks no more; returns the gangs that are granted theirs by this."""
        self._wanted.pop(gang, None)
        self._granted.discard(gang)
        return self._grant()

    def _grant(self) -> list[str]:
        taken: set[str] = set()
        new = []
        for gang, workers in self._wanted.items():
            if gang not in self._granted and taken.isdisjoint(workers):
                self._granted.add(gang)
                new.append(gang)
            taken |= workers
        return new
