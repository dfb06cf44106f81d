"""The scheduler's process: a child of the head rank's agent, so that neither a busy script nor busy nannies slow it down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import warnings
from typing import Any

from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.network.ucx import hide_gpus

from .orders import SchedulerSettings

__all__ = ["run_scheduler"]

#: Seconds that plugins and connections get to close; the process ends then in any case.
CLOSE_GRACE = 1.0
#: Seconds that the dashboard waits for the script's client to connect.
CLIENT_GRACE = 5.0


def run_scheduler(settings: SchedulerSettings, pipe: Any) -> None:
    """Run a scheduler until it is closed by a client or by the agent; the target of a process.

    Sends ``("up", address, dashboard_port, id)`` or ``("failed", text, exit_code)`` through `pipe`, takes ``"dashboard"`` and
    ``"close"`` from it, and ends at its end of file.
    """

    async def serve_and_exit() -> None:
        # Not sys.exit, and inside the loop, which would wait for its threads: whatever Dask left behind, or an import of the
        # dashboard that is still under way, must not keep the process.
        code = await _serve(settings, pipe)
        flush()
        os._exit(code)

    try:
        asyncio.run(serve_and_exit())
    finally:
        flush()
        os._exit(1)


async def _serve(settings: SchedulerSettings, pipe: Any) -> int:
    import dask
    from distributed import Scheduler

    # The scheduler has no GPU; distributed would ask NVML for device 0, and a lost one would end it.
    dask.config.set({"distributed.diagnostics.nvml": False, **settings.config})
    hide_gpus(os.environ, but=settings.device)
    # distributed warns when the dashboard's port is taken and takes another; the link that we print says which.
    warnings.filterwarnings("ignore", message="(?s)Port .* is already in use")
    try:
        scheduler = Scheduler(
            host=settings.host,
            port=settings.port,
            protocol=str(settings.protocol),
            # The dashboard's import (bokeh) takes longer than all the rest: it follows when the cluster is up.
            dashboard=False,
            dashboard_address=settings.dashboard_address,
        )
        await scheduler
    except Exception as error:
        pipe.send(_failure(error, settings))
        return 1
    http_server: Any = scheduler.http_server
    http_port = http_server.port if http_server is not None else None
    pipe.send(("up", scheduler.address, http_port, scheduler.id))
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []  # the loop itself only holds them weakly

    def on_command() -> None:
        try:
            command = pipe.recv()
        except (EOFError, OSError):
            command = "close"
        if command == "dashboard" and settings.dashboard:
            tasks.append(loop.create_task(_attach_dashboard(scheduler)))
        elif command == "close":
            loop.remove_reader(pipe.fileno())
            asked.set()

    loop.add_reader(pipe.fileno(), on_command)
    finished = asyncio.ensure_future(scheduler.finished())
    closing = asyncio.ensure_future(asked.wait())
    await asyncio.wait({finished, closing}, return_when=asyncio.FIRST_COMPLETED)
    # One that its client closed may still be telling the workers; one that we close may have plugins to close. With bokeh
    # 3.10.2 Scheduler.close raises: the job ends all the same.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(scheduler.close(reason="dask_gpu_mpi-ends"), CLOSE_GRACE)
    return 0


def _failure(error: BaseException, settings: SchedulerSettings) -> tuple[str, str, int]:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            "failed",
            f"port {settings.port} at {settings.host} is in use, the scheduler can't listen there: choose another with "
            "scheduler_port (--scheduler-port), or leave it out for any free port",
            2,
        )
    return ("failed", f"the scheduler did not start: {type(error).__name__}: {error}", 1)


async def _attach_dashboard(scheduler: Any) -> None:
    """Bring up the dashboard's pages, without holding up the event loop for its imports, and after the first client.

    They take a second of this process and of a core, for which the script would wait while it connects.
    """
    import importlib

    try:
        loop = asyncio.get_running_loop()
        until = loop.time() + CLIENT_GRACE
        # one is always there: the scheduler's own, for what is fired and forgotten
        while len(scheduler.clients) < 2 and loop.time() < until:
            await asyncio.sleep(0.25)
        module = await loop.run_in_executor(None, importlib.import_module, "distributed.dashboard.scheduler")
        module.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="/")
    except Exception as error:  # a cluster without pages is better than none
        import logging

        logging.getLogger("dask_gpu_mpi").warning("no dashboard: %s: %s", type(error).__name__, error)
