"""What happens again and again, as one line a minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

__all__ = ["PERIOD", "Tally"]

#: Seconds that a line stands for.
PERIOD = 60.0
#: Sources that are counted one by one: whoever has a whole network of addresses must not fill the memory either.
MOST_SOURCES = 1000
#: Sources that a line names.
NAMED = 3


class Tally:
    """Counts what strangers do: the first time is reported at once, what follows once in `PERIOD` seconds, with its number.

    Parameters
    ----------
    report : callable
        ``report(text)`` writes a line.
    later : callable
        ``later(seconds, function)`` calls the function then, as ``loop.call_later`` does.
    clock : callable
        Seconds.

    Examples
    --------
    >>> waiting, times = [], iter((0.0, 60.0, 60.0))
    >>> tally = Tally(print, lambda seconds, function: waiting.append(function), clock=times.__next__)
    >>> for host in ("h1", "h2", "h2"):
    ...     tally.add(f"no handshake with {host}", host)
    no handshake with h1
    >>> waiting.pop()()
    2 more of this kind in 60 s (2 from h2); the last: no handshake with h2
    """

    def __init__(
        self,
        report: Callable[[str], object],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._later = later
        self._clock = clock
        #: When the last line was written; None: a minute or more ago.
        self._since: float | None = None
        self._sources: Counter[str] = Counter()
        self._last = ""

    def add(self, text: str, source: str) -> None:
        """It has happened: `text` says what, `source` who did it."""
        if self._since is None:
            self._begin()
            self._report(text)
            return
        if source not in self._sources and len(self._sources) >= MOST_SOURCES:
            source = "others"
        self._sources[source] += 1
        self._last = text

    def _begin(self) -> None:
        self._since = self._clock()
        self._later(PERIOD, self._end)

    def _end(self) -> None:
        since, self._since = self._since, None
        if not self._sources or since is None:
            return
        total = self._sources.total()
        named = [f"{count} from {source}" for source, count in self._sources.most_common(NAMED)]
        others = len(self._sources) - NAMED
        named += [f"the others from {others} more"] if others > 0 else []
        text = f"{total} more of this kind in {self._clock() - since:.0f} s ({', '.join(named)}); the last: {self._last}"
        self._sources.clear()
        self._begin()
        self._report(text)
