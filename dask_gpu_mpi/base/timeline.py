"""Begin and end of each step of the start, for the report.

Every process keeps a handful of time stamps. If the user requests a report, they are sent to rank 0 with the message ``ready``,
which is sent in any case, so nothing waits for them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Names by which the processes of a job find what is recorded of it.

#: Operation of the scheduler that answers with its record (`view.recorder`).
RECORD_OPERATION = "gpu_mpi_record"
#: Dask's topic of events for the deaths of workers' processes.
DEATHS_TOPIC = "dask-gpu-mpi-deaths"
#: The scheduler's plugin that follows which workers come and go (`view.job_watch`).
JOB_PLUGIN = "dask_gpu_mpi-job"
#: Key of our metric among those of a worker's heartbeat (`workers.plugins`).
METRIC = "gpu_mpi"


class Step(NamedTuple):
    """One step of one process; times in seconds since the epoch, by the clock of the process's host."""

    #: "rank", "agent", "scheduler" or "worker NAME".
    process: str
    name: str
    start: float
    end: float


class Timeline:
    """The steps of one process, and of those that it watches; the first begins with the process."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._since = process_start()
        self._steps: list[Step] = []

    def lap(self, name: str) -> None:
        """Add the step that began with the end of the last lap."""
        now = time.time()
        self._steps.append(Step(self._process, name, self._since, now))
        self._since = now

    @contextlib.contextmanager
    def step(self, name: str, process: str | None = None) -> Iterator[None]:
        """Add a step within a lap, or of another process, even if it fails."""
        start = time.time()
        try:
            yield
        finally:
            self._steps.append(Step(process or self._process, name, start, time.time()))

    def add(self, steps: Sequence[Step]) -> None:
        """Add steps that another process has recorded."""
        self._steps += steps

    def take(self) -> list[Step]:
        """The steps that have not been taken before."""
        steps, self._steps = self._steps, []
        return steps


def process_start() -> float:
    """The start of this process, in seconds since the epoch, to 10 ms.

    Field 22 (starttime) of ``/proc/self/stat`` is in clock ticks since boot; see proc(5).
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
