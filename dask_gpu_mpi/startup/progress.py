"""What rank 0 shows while the cluster starts: one line that changes on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.base.streams import write

__all__ = ["Progress"]

#: Seconds before the first line, and between lines: on a terminal, and elsewhere.
ON_TERMINAL, IN_FILE = 0.5, 10.0
#: Hosts named at most.
NAMED = 8


class Progress:
    """Shows who is still awaited.

    Parameters
    ----------
    started : float
        Time of the start, seconds.
    stream : file, optional
        Default: standard error.
    """

    def __init__(self, started: float, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._every = ON_TERMINAL if self._terminal else IN_FILE
        self._next = started + self._every
        self._shown = False

    def due(self, now: float) -> bool:
        """Whether it is time for a line; asked before the numbers are counted."""
        return now >= self._next

    def show(self, now: float, ready: int, planned: int | None, hosts: Sequence[str]) -> None:
        """Print how many workers are ready, and which hosts are awaited; nothing while it is too early for another line.

        Parameters
        ----------
        now : float
            Time, seconds.
        ready, planned : int, int or None
            Workers; None while there is no plan.
        hosts : sequence of str
            Those that are awaited; ``""`` for a rank whose host is not known.
        """
        if now < self._next:
            return
        self._next = now + self._every
        known = sorted({host for host in hosts if host})
        names = fold_names(known[:NAMED]) + (" and others" if len(known) > NAMED else "")
        unknown = sum(not host for host in hosts)
        parts = [names] if names else []
        if unknown:
            parts.append(f"{unknown} {'rank that has' if unknown == 1 else 'ranks that have'} not responded")
        count = "starting" if planned is None else f"{ready} of {planned} workers"
        self._write(f"dask_gpu_mpi: {count}, waiting for {' and '.join(parts) or 'the scheduler'}")

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._terminal and self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        write(self._stream, f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._shown = True
