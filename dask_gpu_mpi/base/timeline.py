"""When each step of the start and of the end began and ended, as a file for Perfetto or ``chrome://tracing``.

Every process always keeps a handful of time stamps. Where the user asks for the file, they are sent to rank 0 with the messages
``ready`` and ``closed``, which are sent in any case: nothing waits for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dask_gpu_mpi.errors import InputError

from .safe_paths import check_replaceable, replace

__all__ = ["Step", "Timeline", "check_path", "process_start", "trace", "write"]


class Step(NamedTuple):
    """One step of one process; times in seconds since the epoch, by the clock of the process's host."""

    #: "rank", "agent", "scheduler" or "worker NAME".
    process: str
    #: What was done.
    name: str
    start: float
    end: float


class Timeline:
    """The steps of one process, and of those that it watches.

    The first step begins at `start`; by default when the process was made.
    """

    def __init__(self, process: str, start: float | None = None) -> None:
        self._process = process
        self._since = process_start() if start is None else start
        self._steps: list[Step] = []

    def lap(self, name: str) -> None:
        """What this process has done since its last lap."""
        now = time.time()
        self._steps.append(Step(self._process, name, self._since, now))
        self._since = now

    @contextlib.contextmanager
    def step(self, name: str, process: str | None = None) -> Iterator[None]:
        """A step within a lap, or of another process; kept also where it fails."""
        start = time.time()
        try:
            yield
        finally:
            self._steps.append(Step(process or self._process, name, start, time.time()))

    def add(self, steps: Sequence[Step]) -> None:
        """Keep steps that another process has recorded."""
        self._steps += steps

    def take(self) -> list[Step]:
        """The steps that have not been taken before."""
        steps, self._steps = self._steps, []
        return steps


def process_start() -> float:
    """When this process was made, in seconds since the epoch, to 10 ms; now, where /proc does not tell.

    Source: field 22 (starttime) of ``/proc/self/stat``, in clock ticks since boot; see proc(5).
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - age


def check_path(path: str, host: str) -> None:
    """Raise InputError for a file that can't be written, before anything starts."""
    try:
        check_replaceable(path)
    except OSError as error:
        raise InputError(
            f"the timeline {path!r} can't be written by rank 0 on {host} ({error.strerror}). Fix: set timeline (--timeline) to a "
            "file in a directory that exists and is writable"
        ) from None


def trace(hosts: Mapping[int, str], steps: Mapping[int, Sequence[Step]]) -> dict[str, Any]:
    """The steps of all ranks, by rank, in Chrome's trace format.

    ``pid`` is the rank, ``tid`` one of its processes, ``ts`` and ``dur`` are microseconds. Source: "Trace Event Format",
    https://chromium.googlesource.com/catapult, docs.
    """
    events: list[dict[str, Any]] = []
    for rank in sorted(steps):
        where = f" on {hosts[rank]}" if rank in hosts else ""
        events.append(_name(rank, 0, "process_name", f"rank {rank}{where}"))
        tids: dict[str, int] = {"rank": 0, "agent": 1, "scheduler": 2}
        named: set[str] = set()
        for step in sorted(steps[rank], key=lambda step: step.start):
            tid = tids.setdefault(step.process, len(tids))
            if step.process not in named:
                named.add(step.process)
                events.append(_name(rank, tid, "thread_name", step.process))
            start = round(step.start * 1e6)
            length = max(0, round(step.end * 1e6) - start)
            events.append({"name": step.name, "ph": "X", "ts": start, "dur": length, "pid": rank, "tid": tid})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(rank: int, tid: int, kind: str, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": text}}


def write(path: str, hosts: Mapping[int, str], steps: Mapping[int, Sequence[Step]]) -> None:
    """Write the file, whole or not at all; OSError where it can't be written."""
    replace(path, json.dumps(trace(hosts, steps)).encode())
