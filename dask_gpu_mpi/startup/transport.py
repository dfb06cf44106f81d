"""Connections of the cluster, as pure functions for the coordinator: the data that goes over UCX, and timeouts for many workers.

Each agent finds out how far its workers can use UCX (`ucx_ability`); the coordinator chooses for the job (`choose_transport`).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.network.ucx import UcxAbility, missing_ucx, opened_by, way_between_nodes
from dask_gpu_mpi.options.model import Options, Transport, WorkerUcx
from dask_gpu_mpi.plan import Plan


def ucx_ability(options: Options, *, gpus: bool) -> UcxAbility:
    """How far the workers of this rank can use UCX beside TLS.

    `options`: what the user asked for. `gpus`: whether this rank sees GPUs.
    """
    wanted = options.worker_ucx
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not gpus):
        return UcxAbility()
    if str(options.worker_class).rpartition(".")[2] == "Worker":
        return UcxAbility(
            Problem(
                "workers of the class distributed.Worker run in the agent",
                fix="worker_class (--worker-class) distributed.Nanny",
            )
        )
    if wanted is WorkerUcx.AUTO and options.worker_class != "auto" and options.worker_kind != "gpu":
        return UcxAbility(
            Problem("worker_class is not dask_cuda.CUDAWorker", fix="leave it out, or choose --protocol tls")
        )
    if missing := missing_ucx(device_memory=gpus):
        return UcxAbility(missing)
    opened = opened_by(os.environ, options.worker_options)
    between, system = ("", "") if opened else way_between_nodes(os.environ, device_memory=gpus)
    return UcxAbility(None, between, opened, system)


def choose_transport(
    wanted: WorkerUcx,
    plan: Plan,
    abilities: Mapping[int, UcxAbility],
    *,
    attaches: bool = False,
    sealed: bool = True,
) -> Transport:
    """The data that goes over UCX, and the line that says so and why.

    `wanted`: what the user asked for. `abilities`: by rank. `attaches`: the workers are added to those of a running cluster.
    `sealed`: streams are encrypted. Raises InputError: the user asked for UCX, and a rank can't use it.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return Transport(line=Problem("" if sealed else f"TLS; {_OPEN_DATA}"))
    obstacle = _reason(working, abilities, lambda ability: ability.obstacle)
    if wanted is WorkerUcx.ALL and obstacle:
        raise InputError(f"protocol 'ucx': {obstacle.text}", fix=obstacle.fix)
    if len(plan.workers) == 1 and not attaches:
        return Transport()
    if wanted is WorkerUcx.AUTO and (without := sorted(working - with_gpus)):
        obstacle = Problem(f"{ranks_text(without)} without a GPU")
    nodes = {worker.host for worker in plan.workers}
    not_between = _reason(working, abilities, lambda ability: ability.between_nodes)
    if not obstacle and not_between and len(nodes) == len(plan.workers) and not attaches:
        obstacle = Problem(f"each node has one worker, and UCX leads to no other node: {not_between.text}")
    if obstacle:
        effect = "all data is encrypted" if wanted is WorkerUcx.ALL else "GPU data goes through host memory"
        effect = effect if sealed else _OPEN_DATA
        return Transport(line=Problem(f"TLS; {effect}. No UCX: {obstacle.text}", fix=obstacle.fix))
    line = f"TLS, and UCX for {'large data' if wanted is WorkerUcx.ALL else 'GPU memory'} between workers"
    if not_between and len(nodes) > 1:
        between = "encrypted streams" if sealed else f"streams, where {_OPEN_DATA}"
        line += f" of a node (authenticated, not encrypted). Between nodes {between}: {not_between.text}"
    else:
        line += " (authenticated, not encrypted)"
    if system := _reason(working, abilities, lambda ability: ability.system):
        line += f"; {system.text}, which has RDMA"
    opened = _reason(working, abilities, lambda ability: ability.opened_by)
    return Transport(wanted, Problem(line), opened and _open_port(opened), not_between is None)


#: The effect of the option `data_encryption` without UCX.
_OPEN_DATA = "large arrays are not encrypted (data_encryption)"


def _open_port(opened_by: Problem) -> Problem:
    """The warning of a user's setting by which UCX listens."""
    return Problem(
        f"{opened_by.text} has UCX open a TCP port in each worker, and UCX checks nobody: anyone who reaches the port can run "
        "code as you",
        fix="leave the setting out; within a node UCX needs no TCP",
        what="transport",
    )


def _reason(
    working: set[int],
    abilities: Mapping[int, UcxAbility],
    reason_of: Callable[[UcxAbility], Problem | str | None],
) -> Problem | None:
    """The first reason that an ability has, with its ranks unless all have it; None: none has one."""
    ranks_of: dict[Problem | str, list[int]] = {}
    for rank in sorted(working):
        if reason := reason_of(abilities.get(rank, UcxAbility())):
            ranks_of.setdefault(reason, []).append(rank)
    for reason, ranks in ranks_of.items():
        problem = reason if isinstance(reason, Problem) else Problem(reason)
        return problem if len(ranks) == len(working) else replace(problem, where=ranks_text(ranks))
    return None


# Settings that keep a start with many workers from timing out, though it takes longer than one with few.
#
# The scheduler accepts the connections of all workers one after the other. With Dask's default timeouts 1,300 workers were lost
# (dask/distributed#3691). And workers that share a core start one after the other, however few they are. So from some hundreds of
# workers in the job, or from eight for each core of a host, connections and the whole start may take longer. The scheduler's
# queue of connections is longer, too, and in large jobs ranks start their workers one after the other.

CONNECT = "distributed.comm.timeouts.connect"
BACKLOG = "distributed.comm.socket-backlog"
#: distributed's defaults (2026.7), in seconds and in connections.
DEFAULT_CONNECT, DEFAULT_BACKLOG = 30.0, 2048
#: Seconds that the scheduler may take to accept one worker: ten times what it took when measured (benchmarks/results/README.md).
PER_WORKER = 0.05
#: Seconds that a worker may take to start for each worker on its core. Rank, agent and worker need 1.4 seconds of CPU (as above).
PER_SHARED_CORE = 4.0
#: The longest timeout of a connection, in seconds: it is also how long a host that has died goes unnoticed.
LONGEST_CONNECT = 600.0
#: Connections that a worker and its nanny open to the scheduler while they start (3), and one to spare.
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
