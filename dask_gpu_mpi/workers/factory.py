"""A worker from its line of the plan, and from what all workers of its rank have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.network.ucx import hidden_transports, shown_transports, users_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.plan.model import Start, WorkerPlan
from dask_gpu_mpi.workers.cuda_worker import make_cuda_worker
from dask_gpu_mpi.workers.worker_class import accepted_options, is_cuda_worker, worker_class_for
from dask_gpu_mpi.workers.worker_options import options_for

# The nannies of workers: what is changed of them before they start, and when they no longer restart a worker that dies.

#: Deaths of a worker's processes within so many seconds after which the worker is removed, however long each process lived: one
#: that dies every 11 s gets nothing done. One that dies every half minute, or less often, may, and is always restarted.
DEATHS, WINDOW = 5, 120.0
#: Seconds between polls.
INTERVAL = 0.25
#: Seconds that Dask gives a worker's process to end when its nanny closes, unless that is called with others.
DASK_CLOSES = 5.0
#: Seconds beyond those, for the teardown of plugins.
CLOSING_SLACK = 5.0

logger = logging.getLogger("dask_gpu_mpi")


def closing_reason(nanny: Any) -> Callable[[], str]:
    """Record why a nanny closes, and let it close in time; returns a function that returns the reason.

    A nanny closes by itself when the scheduler has closed its worker, and when it can't restart it; afterwards only the reason
    differs. A plugin of the user's whose teardown hangs would keep it, and its worker would never be removed.
    """
    reasons: list[str] = []
    close = nanny.close

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        reasons.append(str(kwargs.get("reason", "")))
        deadline = asyncio.timeout((kwargs.get("timeout") or DASK_CLOSES) + CLOSING_SLACK)
        try:
            # In this task: a server that closes cancels all its own tasks but the one that closes it.
            async with deadline:
                return await close(*args, **kwargs)
        except TimeoutError:
            if not deadline.expired():
                raise  # Dask's own
        logger.warning(
            "the nanny of worker %s has not closed, perhaps because of a plugin's teardown; it is closed without that",
            getattr(nanny, "name", None),
        )
        await _close_alone(nanny)
        return "OK"

    nanny.close = remembering
    return lambda: reasons[0] if reasons else ""


async def _close_alone(nanny: Any) -> None:
    """What is left of ``Nanny.close`` after the teardown of plugins."""
    from distributed.core import Server, Status

    with contextlib.suppress(Exception):
        await asyncio.wait_for(nanny.kill(timeout=CLOSING_SLACK / 2, reason="nanny-close"), CLOSING_SLACK)
    if nanny.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(nanny.pid, signal.SIGKILL)
    nanny.status = Status.closed
    await Server.close(nanny)


async def watch_nanny(
    nanny: Any,
    clock: Callable[[], float] = time.monotonic,
    *,
    on_death: Callable[[int, int | None], None] = lambda pid, code: None,
) -> str:
    """Wait until a nanny's worker has died too often, and close the nanny.

    Parameters
    ----------
    on_death : callable
        ``on_death(pid, exit_code)`` of each process that has died, the code None where it is not known.

    Returns
    -------
    str
        Why the worker is removed.
    """
    pid, asked, process = nanny.pid, _requested_ends(nanny), _process(nanny)
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        await asyncio.sleep(INTERVAL)
        current = nanny.pid
        if current == pid:
            continue
        code = getattr(process, "exitcode", None)
        in_order = pid in asked or _is_closing(nanny) or (code == 0 and _has_lifetime(nanny))
        if pid is not None and not in_order:
            deaths.append(clock())
            on_death(pid, code)
        pid, process = current, _process(nanny)
        if len(deaths) == DEATHS and (seconds := deaths[-1] - deaths[0]) <= WINDOW:
            await nanny.close(reason="nanny-instantiate-too-often")
            return f"its process died {DEATHS} times within {seconds:.0f} s"


def _is_closing(nanny: Any) -> bool:
    """Whether it ends together with its worker: that was retired, or the cluster ends."""
    return getattr(getattr(nanny, "status", None), "name", "") in ("closing_gracefully", "closing", "closed")


def _has_lifetime(nanny: Any) -> bool:
    """Whether its worker ends by itself after some time (Dask's ``lifetime``), in order, and is to be restarted then."""
    import dask

    configured = dask.config.get("distributed.worker.lifetime.duration", None)
    return bool(getattr(nanny, "worker_kwargs", {}).get("lifetime") or configured)


def _process(nanny: Any) -> Any:
    """Dask's object of a nanny's process, which knows its exit code when the nanny has forgotten it."""
    return getattr(getattr(nanny, "process", None), "process", None)


def _requested_ends(nanny: Any) -> set[int | None]:
    """The processes that this nanny is asked to end from now on (``client.restart()``): those count as no deaths."""
    asked: set[int | None] = set()
    kill, handlers = getattr(nanny, "kill", None), getattr(nanny, "handlers", {})
    if kill is None:  # in another version of distributed
        return asked

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        asked.add(nanny.pid)
        return await kill(*args, **kwargs)

    # `Nanny.restart` calls the one, and the scheduler the other.
    nanny.kill = handlers["kill"] = remembering
    return asked


def measure_less(nanny: Any) -> None:
    """Leave out what a nanny measures of itself, which nobody reads: its event loop, and its process.

    The one is 50 wake-ups a second, 1.5 % of a core, for a warning; the other two of them, 0.1 %. What scheduler and workers
    measure stays, and the nanny continues to watch its worker's memory.
    """
    callbacks = getattr(nanny, "periodic_callbacks", {})
    for name in ("tick", "ticks", "monitor"):
        callbacks.pop(name, None)


def kill_at_once() -> None:
    """Have nannies kill a worker where Dask's send it SIGTERM: above its memory limit, and when it has not come up.

    Our workers leave SIGTERM to the rank (`boot.ignore_signals`); Dask's have no handler, and it ends them as SIGKILL does.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from distributed.process import AsyncProcess

        AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


def listen_on_tcp(nanny: Any) -> None:
    """Have a nanny of a worker over UCX listen on TCP: it moves no data, and UCX keeps a core busy there."""
    # The worker's protocol has been settled by the nanny's constructor.
    if getattr(nanny, "_protocol", None) == "ucx":
        nanny._protocol = "tcp"


#: Least bytes of host memory that go over UCX where the user wants that: below, TLS is as fast.
LARGE = 65536
LOOPBACK = "127.0.0.1"


def make_worker(plan: WorkerPlan, start: Start, options: Options, scratch: str) -> Any:
    """Make the worker that `plan` describes; it starts when awaited.

    Parameters
    ----------
    plan : WorkerPlan
        Its line of the plan.
    start : Start
        What it shares with the other workers of its rank.
    options : Options
        What the user has set, the class and its options (`read_worker_options`) among it.
    scratch : str
        The agent's directory; each worker makes a directory of its own in it.

    Returns
    -------
    distributed.core.Server
        A CUDAWorker, Nanny, Worker or whatever the user's class makes.

    Raises
    ------
    InputError
        An option does not fit the device.
    """
    import distributed

    from dask_gpu_mpi.workers.plugins import plugins_of

    cls = worker_class_for(plan.kind, options.worker_class)
    given = options_for(cls, options.worker_options)
    ours: dict[str, Any] = {
        "name": plan.name,
        "nthreads": plan.nthreads,
        "memory_limit": plan.memory_limit or None,
        "local_directory": scratch,
        "protocol": str(start.protocol),
    }
    if not (is_cuda_worker(cls) or issubclass(cls, (distributed.Nanny, distributed.Worker))):
        # A class of the user's: dask-mpi's six options, the scheduler through the Dask configuration, as dask-mpi has it.
        return cls(**{**ours, "interface": options.interface, **given})
    ours |= {
        "host": start.listen,
        # bokeh would be imported in every worker; the address is of plain HTTP, with or without a dashboard
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": max(options.startup_timeout, start.limit),
    }
    plugins = [*plugins_of(plan, options.log_directory, records=options.recorded)]
    if is_cuda_worker(cls) or issubclass(cls, distributed.Nanny):  # others run in this process
        plugins += _ucx_plugin(plan, start)
    if is_cuda_worker(cls):
        given = {"device_memory_limit": "default", **given, **plan.device_sizes}
        resources = [f"{key}={value:g}" for key, value in plan.resources.items()]
        given["resources"] = " ".join(filter(None, [*resources, given.get("resources")]))
        return make_cuda_worker(cls, plan, {**ours, "scheduler": start.address, **given}, plugins)
    if cls is distributed.Nanny:
        # Where the class is "auto" or CUDAWorker, options that only CUDAWorker has are not for CPU workers.
        known = accepted_options(cls, given.get("worker_class")) or given
        given = {key: value for key, value in given.items() if key in known}
    given["plugins"] = {*given.get("plugins", ()), *plugins}
    if plan.resources:
        ours["resources"] = dict(plan.resources)
    if issubclass(cls, distributed.Nanny):
        ours |= _for_nanny(cls, plan, beside_gpus=start.beside_gpus)
    # a CPU worker is to make no context either
    with users_config() if plan.kind == "gpu" else nullcontext():
        return cls(start.address, **_merge(ours, given))


def _ucx_plugin(plan: WorkerPlan, start: Start) -> Iterator[Any]:
    """What has the worker offer UCX to others. Not a CPU worker beside GPU workers, which must not touch their devices."""
    transport = start.transport
    if transport.ucx is WorkerUcx.OFF or (plan.kind == "cpu" and start.beside_gpus):
        return
    from distributed.comm.addressing import get_address_host

    from dask_gpu_mpi.workers.plugins import UcxBetweenWorkers

    host_frames = LARGE if transport.ucx is WorkerUcx.ALL else 0
    probes = start.ucx_probe is not None and plan.name == start.ucx_probe
    # where no address was chosen the job has joined a cluster
    listens = start.listen or get_address_host(start.address)
    yield UcxBetweenWorkers(
        host_frames,
        loopback=listens == LOOPBACK,
        leads=transport.between_nodes,
        warned=bool(transport.warning),
        probes=probes,
    )


def _for_nanny(cls: type, plan: WorkerPlan, *, beside_gpus: bool) -> dict[str, Any]:
    """What a Nanny is given besides, for its worker's process: the devices that it sees, and what it measures."""
    import distributed

    ours: dict[str, Any] = {}
    if plan.device is not None:
        ours["env"] = {**shown_transports(), VISIBLE_DEVICES: plan.device}
    elif beside_gpus:
        # a CPU worker beside GPU workers must not touch their devices
        ours["env"] = {**hidden_transports(), VISIBLE_DEVICES: ""}
    if plan.kind == "cpu" and cls is distributed.Nanny:
        # Its worker would show the first GPU's memory and load as its own. And to ask for RMM's initialises CUDA, one process
        # after the other: 32 workers of a host took two seconds.
        ours["config"] = {"distributed.diagnostics.nvml": False}
        ours["metrics"] = {}
    return ours


def _merge(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options win, except that environments, resources and configurations are added to ours.

    >>> _merge({"env": {"A": "1"}, "nthreads": 1}, {"env": {"B": "2"}, "nthreads": 2})
    {'env': {'A': '1', 'B': '2'}, 'nthreads': 2}
    """
    merged = {**ours, **options}
    for key in ("env", "resources", "config"):
        if isinstance(ours.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**ours[key], **options[key]}
    return merged
