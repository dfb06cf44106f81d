"""Makes a worker from its line of the plan, and adapts and watches its nanny, which restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, is_profiled
from dask_gpu_mpi.network.interfaces import as_host
from dask_gpu_mpi.network.ucx import hidden_transports, shown_transports, users_config
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.model import Start, WorkerPlan
from dask_gpu_mpi.workers.cuda_worker import make_cuda_worker
from dask_gpu_mpi.workers.worker_class import accepted_options, is_cuda_worker, worker_class_for
from dask_gpu_mpi.workers.worker_options import options_for

#: A worker is removed after so many deaths of its processes within so many seconds, however long each process lived: one that
#: dies every 11 s gets nothing done. One that dies every half minute, or less often, may, and is always restarted.
DEATHS, WINDOW = 5, 120.0
#: Seconds between polls.
INTERVAL = 0.25
#: Seconds for a nanny to close: Dask gives its worker's process five of them, and plugins may have a teardown.
CLOSING = 10.0


def adapt_nanny(nanny: Any) -> Callable[[], str]:
    """Change a nanny before its start; returns a function that returns why it has closed.

    A nanny closes when the scheduler has closed its worker, and when it can't restart it; afterwards only the reason
    differs.
    """
    # They measure the nanny's event loop and process, which nothing reads, by 50 wake-ups a second, 1.5 % of a core, and two a
    # second, 0.1 %. The nanny continues to watch its worker's memory.
    for name in ("tick", "ticks", "monitor"):
        nanny.periodic_callbacks.pop(name, None)
    # The constructor has already set the worker's protocol. A nanny moves no data, and UCX would keep a core busy.
    if nanny._protocol == "ucx":
        nanny._protocol = "tcp"
    reasons: list[str] = []
    close = nanny.close

    async def remembering(*args: Any, reason: str = "", **kwargs: Any) -> Any:
        reasons.append(reason)
        return await close(*args, reason=reason, **kwargs)

    nanny.close = remembering
    return lambda: reasons[0] if reasons else ""


async def watch_nanny(
    nanny: Any,
    clock: Callable[[], float] = time.monotonic,
    *,
    on_death: Callable[[int, int | None], None] = lambda pid, code: None,
) -> str:
    """Wait until a nanny's worker has died too often, close the nanny, and return why the worker is removed.

    Calls ``on_death(pid, exit_code)`` for each process that has died; the code is None if it is not known.
    """
    pid, asked, process = nanny.pid, _requested_ends(nanny), _process(nanny)
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        await asyncio.sleep(INTERVAL)
        current = nanny.pid
        if current == pid:
            continue
        code = getattr(process, "exitcode", None)
        # It ends together with its worker, which was retired, or with the cluster.
        is_closing = nanny.status.name in ("closing_gracefully", "closing", "closed")
        # A worker whose `lifetime` is over ends with 0.
        if pid is not None and pid not in asked and not is_closing and code != 0:
            deaths.append(clock())
            on_death(pid, code)
        pid, process = current, _process(nanny)
        if len(deaths) == DEATHS and (seconds := deaths[-1] - deaths[0]) <= WINDOW:
            # the teardown of a user's plugin may hang
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await nanny.close(reason="nanny-instantiate-too-often")
            return f"its process died {DEATHS} times within {seconds:.0f} s"


def _process(nanny: Any) -> Any:
    """Dask's object of a nanny's process, which has the exit code even when the nanny no longer has the process."""
    return nanny.process and nanny.process.process


def _requested_ends(nanny: Any) -> set[int | None]:
    """The set of processes that this nanny has to end from now on (``client.restart()``): they do not count as deaths."""
    asked: set[int | None] = set()
    kill = nanny.kill

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        asked.add(nanny.pid)
        return await kill(*args, **kwargs)

    # `Nanny.restart` calls the method, the scheduler the handler.
    nanny.kill = nanny.handlers["kill"] = remembering
    return asked


def kill_at_once() -> None:
    """Make nannies send SIGKILL when Dask's send SIGTERM: above the memory limit, and to a worker that has not come up.

    Our workers leave SIGTERM to the rank (`base.signals.ignore_signals`). Dask's have no handler, so SIGTERM ends them too.
    """
    from distributed.process import AsyncProcess

    AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


#: Least bytes of host memory that go over UCX if the user chooses that: below, TLS is as fast.
LARGE = 65536
LOOPBACK = "127.0.0.1"


def make_worker(plan: WorkerPlan, start: Start, options: Options, scratch: str) -> Any:
    """Make the worker that `plan` describes: a CUDAWorker, Nanny, Worker or instance of the user's class; it starts when awaited.

    `start` has the values that all workers of the rank share, `options` the class and its options (`read_worker_options`).
    `scratch` is the agent's directory, in which each worker makes another. Raises an InputError if an option does not fit the
    device.
    """
    import distributed

    from dask_gpu_mpi.workers.plugins import NearMemory, NewProcess, plugins_of

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
        # The user's class: dask-mpi's six options, and the scheduler through the Dask configuration, as in dask-mpi.
        return cls(**{**ours, "interface": options.interface, **given})
    ours |= {
        "host": as_host(start.listen),
        # a dashboard would import bokeh in every worker; the address is for plain HTTP, with or without a dashboard
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "death_timeout": max(options.startup_timeout, start.limit),
    }
    plugins = [*plugins_of(plan, options.log_directory, records=options.recorded)]
    if is_cuda_worker(cls) or issubclass(cls, distributed.Nanny):  # others run in this process
        plugins += _ucx_plugin(plan, start)
        plugins += [] if plan.numa is None else [NearMemory(plan.numa)]
        if is_profiled(os.environ):
            quiet, ucx = options.log_directory is not None, options.protocol.moves_device_memory
            plugins.append(NewProcess(options.log_level, scratch, quiet, ucx))
    if is_cuda_worker(cls):
        given = {"device_memory_limit": "default", **given, **plan.device_sizes}
        resources = [f"{key}={value:g}" for key, value in plan.resources.items()]
        given["resources"] = " ".join(filter(None, [*resources, given.get("resources")]))
        return make_cuda_worker(cls, plan, {**ours, "scheduler": start.address, **given}, plugins)
    if cls is distributed.Nanny:
        # If the class is "auto" or CUDAWorker, options that only CUDAWorker has are not for CPU workers.
        known = accepted_options(cls, given.get("worker_class")) or given
        given = {key: value for key, value in given.items() if key in known}
    given["plugins"] = {*given.get("plugins", ()), *plugins}
    if plan.resources:
        ours["resources"] = dict(plan.resources)
    if issubclass(cls, distributed.Nanny):
        ours |= _for_nanny(cls, plan, beside_gpus=start.beside_gpus)
    # a CPU worker must make no context
    with users_config() if plan.kind == "gpu" else nullcontext():
        return cls(start.address, **_merge(ours, given))


def _ucx_plugin(plan: WorkerPlan, start: Start) -> Iterator[Any]:
    """The plugin by which the worker offers UCX to others; none for a CPU worker with GPU workers on its rank."""
    transport = start.transport
    if transport.ucx is WorkerUcx.OFF or (plan.kind == "cpu" and start.beside_gpus):
        return
    from distributed.comm.addressing import get_address_host

    from dask_gpu_mpi.workers.plugins import UcxBetweenWorkers

    host_frames = LARGE if transport.ucx is WorkerUcx.ALL else 0
    # if no address was chosen, the job has joined a running cluster
    listens = start.listen or get_address_host(start.address)
    yield UcxBetweenWorkers(
        host_frames,
        loopback=listens == LOOPBACK,
        leads=transport.between_nodes,
        warned=bool(transport.warning),
        devices=plan.nics,
    )


def _for_nanny(cls: type, plan: WorkerPlan, *, beside_gpus: bool) -> dict[str, Any]:
    """Further arguments of a Nanny, for its worker's process: the devices that it sees, and its measurements."""
    import distributed

    ours: dict[str, Any] = {}
    if plan.device is not None:
        ours["env"] = {**shown_transports(), VISIBLE_DEVICES: plan.device}
    elif beside_gpus:
        # a CPU worker must not use the devices of GPU workers
        ours["env"] = {**hidden_transports(), VISIBLE_DEVICES: ""}
    if plan.kind == "cpu" and cls is distributed.Nanny:
        # Its worker would report the first GPU's memory and load. And querying RMM initialises CUDA, in one process after the
        # other: 32 workers of a node took two seconds.
        ours["config"] = {"distributed.diagnostics.nvml": False}
        ours["metrics"] = {}
    return ours


def _merge(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options replace ours, but environments, resources and configurations are added to ours.

    >>> _merge({"env": {"A": "1"}, "nthreads": 1}, {"env": {"B": "2"}, "nthreads": 2})
    {'env': {'A': '1', 'B': '2'}, 'nthreads': 2}
    """
    merged = {**ours, **options}
    for key in ("env", "resources", "config"):
        if isinstance(ours.get(key), Mapping) and isinstance(options.get(key), Mapping):
            merged[key] = {**ours[key], **options[key]}
    return merged
