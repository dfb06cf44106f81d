"""What a large number of workers needs, so that nothing times out by being many.

All workers of a job connect to one scheduler at the same moment, and it takes them one after the other: with Dask's defaults
1,300 workers were lost to handshakes that took too long (dask/distributed#3691). So from some hundreds of workers on the time
to connect and the scheduler's queue of connections grow with their number, ranks start their workers one after the other, and
the start-up deadline leaves the scheduler the time it needs. So they do where many workers share each core of a host: there
it is the workers that take long to answer. What the user has configured stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.options.dask_config import import_config, is_configured

if TYPE_CHECKING:
    from .model import WorkerPlan

__all__ = [
    "BACKLOG",
    "CONNECT",
    "configured_keys",
    "connection_settings",
    "start_delay",
    "start_limit",
    "workers_per_core",
]

CONNECT = "distributed.comm.timeouts.connect"
BACKLOG = "distributed.comm.socket-backlog"
#: distributed's defaults (2026.7), in seconds and in connections.
DEFAULT_CONNECT, DEFAULT_BACKLOG = 30.0, 2048
#: Seconds that the scheduler may take for one worker that joins: ten times what it took when measured (docs/measurements.md).
PER_WORKER = 0.05
#: Seconds that a worker may take to start for each worker with which it shares a core: its rank, its agent and itself take 1.4
#: seconds of CPU (docs/measurements.md).
PER_NEIGHBOUR = 4.0
#: Seconds after which a connection has failed in any case: it is also how long a host that has died goes unnoticed.
LONGEST_CONNECT = 600.0
#: Connections that a worker and its nanny open to the scheduler while they start.
CONNECTIONS = 4
#: Linux takes no longer queue (and cuts it to net.core.somaxconn).
LONGEST_BACKLOG = 65535
#: Workers that may well connect all at once, and seconds between two beyond that: about what the scheduler takes for one.
AT_ONCE, APART = 256, 0.004


def connection_settings(workers: int, crowd: float = 0.0, configured: Collection[str] = ()) -> dict[str, Any]:
    """Dask configuration for every process of a cluster of this size; empty where Dask's defaults will do.

    Parameters
    ----------
    workers : int
        Planned workers.
    crowd : float
        `workers_per_core`.
    configured : collection of str
        Keys that the user has configured, which are left out.

    Examples
    --------
    >>> connection_settings(64)
    {}
    >>> connection_settings(2000)
    {'distributed.comm.timeouts.connect': '100s', 'distributed.comm.socket-backlog': 8000}
    """
    settings: dict[str, Any] = {}
    connect = min(LONGEST_CONNECT, max(PER_WORKER * workers, PER_NEIGHBOUR * crowd))
    if connect > DEFAULT_CONNECT and CONNECT not in configured:
        settings[CONNECT] = f"{connect:g}s"
    backlog = min(LONGEST_BACKLOG, CONNECTIONS * workers)
    if backlog > DEFAULT_BACKLOG and BACKLOG not in configured:
        settings[BACKLOG] = backlog
    return settings


def start_limit(workers: int, crowd: float = 0.0) -> float:
    """Seconds that starting this many workers may take, for a start-up deadline that nobody has said."""
    return 2 * max(PER_WORKER * workers, PER_NEIGHBOUR * crowd)


def workers_per_core(workers: Iterable[WorkerPlan]) -> float:
    """Planned workers for each core of the host that has most of them for its cores; 0 without workers."""
    hosts: dict[str, list[WorkerPlan]] = {}
    for worker in workers:
        hosts.setdefault(worker.host, []).append(worker)
    cores = {host: len({cpu for worker in theirs for cpu in worker.cpus}) for host, theirs in hosts.items()}
    return max((len(theirs) / (cores[host] or 1) for host, theirs in hosts.items()), default=0.0)


def start_delay(before: int, workers: int) -> float:
    """Seconds for which a rank holds back its workers.

    Parameters
    ----------
    before : int
        Workers of the ranks before it.
    workers : int
        All planned workers.

    Examples
    --------
    >>> start_delay(before=100, workers=200), start_delay(before=500, workers=1000)
    (0.0, 2.0)
    """
    return 0.0 if workers <= AT_ONCE else APART * before


def configured_keys() -> frozenset[str]:
    """Which of our keys the user has configured.

    Raises
    ------
    InputError
        A file of Dask's configuration is malformed.
    """
    import_config()
    return frozenset(key for key in (CONNECT, BACKLOG) if is_configured(key))
