"""Settings that keep a start with many workers from timing out, though it takes longer than one with few.

Two things become slow:

- The scheduler accepts the connections of all workers one after the other. With Dask's default timeouts 1,300 workers were
  lost (dask/distributed#3691).
- Workers that share a core start one after the other, however few they are. `workers_per_core` counts them.

So from some hundreds of workers in the job, or from eight workers for each core of a host, connections may take longer
(`connection_settings`), and so may the whole start (`start_limit`). The scheduler's queue of connections is longer, too, and in
large jobs ranks start their workers one after the other (`start_delay`). A setting that the user has configured stays as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_gpu_mpi.plan import Plan

CONNECT = "distributed.comm.timeouts.connect"
BACKLOG = "distributed.comm.socket-backlog"
#: distributed's defaults (2026.7), in seconds and in connections.
DEFAULT_CONNECT, DEFAULT_BACKLOG = 30.0, 2048
#: Seconds that the scheduler may take to accept one worker: ten times what it took when measured (benchmarks/results/README.md).
PER_WORKER = 0.05
#: Seconds that a worker may take to start for each worker on its core: rank, agent and worker take 1.4 seconds of CPU together
#: (benchmarks/results/README.md).
PER_SHARED_CORE = 4.0
#: The longest timeout of a connection, in seconds: it is also how long a host that has died goes unnoticed.
LONGEST_CONNECT = 600.0
#: Connections that a worker and its nanny open to the scheduler while they start.
CONNECTIONS = 4
#: Linux allows no longer queue (and cuts it to net.core.somaxconn).
LONGEST_BACKLOG = 65535
#: Workers that may connect all at once; in larger jobs, seconds between two: about what the scheduler takes for one.
AT_ONCE, APART = 256, 0.004


def connection_settings(workers: int, per_core: float) -> dict[str, Any]:
    """Dask configuration for every process of a cluster of so many workers; empty if Dask's defaults are enough.

    `per_core` is `workers_per_core`.

    >>> connection_settings(64, per_core=0.5)
    {}
    >>> connection_settings(2000, per_core=0.5)
    {'distributed.comm.timeouts.connect': '100s', 'distributed.comm.socket-backlog': 8000}
    """
    settings: dict[str, Any] = {}
    connect = min(LONGEST_CONNECT, _longest_start(workers, per_core))
    if connect > DEFAULT_CONNECT:
        settings[CONNECT] = f"{connect:g}s"
    backlog = min(LONGEST_BACKLOG, CONNECTIONS * workers)
    if backlog > DEFAULT_BACKLOG:
        settings[BACKLOG] = backlog
    return settings


def start_limit(workers: int, per_core: float) -> float:
    """Seconds that the start of this many workers may take where the user has set no start-up timeout."""
    return 2 * _longest_start(workers, per_core)


def _longest_start(workers: int, per_core: float) -> float:
    return max(PER_WORKER * workers, PER_SHARED_CORE * per_core)


def workers_per_core(plan: Plan) -> float:
    """Planned workers for each core of the host that has most workers for its cores.

    A CPU quota counts as so many cores: the affinity mask of a container with a quota has all cores of its machine.
    """
    cores: dict[str, set[int]] = {host.host: set() for host in plan.hosts}
    workers = Counter(worker.host for worker in plan.workers)
    for worker in plan.workers:
        cores[worker.host].update(worker.cpus)
    usable = {host.host: min(len(cores[host.host]) or 1, host.cpu_quota or math.inf) for host in plan.hosts}
    return max(workers[host] / number for host, number in usable.items())


def start_delay(before: int, workers: int) -> float:
    """Seconds for which a rank delays the start of its workers; `before`: workers of the ranks before it, of `workers` in all.

    >>> start_delay(before=100, workers=200), start_delay(before=500, workers=1000)
    (0.0, 2.0)
    """
    return 0.0 if workers <= AT_ONCE else APART * before
