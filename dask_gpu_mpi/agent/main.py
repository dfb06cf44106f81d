"""How an agent starts: it imports Dask, is configured, forks its fork server, and then serves its rank (`serve`).

Started by `handle.AgentProcess`, by way of `boot`, without MPI and without the launcher's variables. Its `__main__` is empty, so
the user's script is never run again in a worker. It takes frames from standard input, the control pipe: at its end of file the
rank is gone or wants no more, and everything here ends within the grace. Answers go through a pipe of their own; standard output
and error are the rank's, so that what tasks print ends where the user looks for it.

The order matters: import while there is one thread; then configure; then fork the fork server; only then start the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from dataclasses import replace
from multiprocessing import active_children
from typing import Any

from dask_gpu_mpi.agent.dashboard_gate import NO_WORKER_ROUTES, asks_for_server, listen_where_routes_are
from dask_gpu_mpi.agent.forkserver import become_fork_server, become_resource_tracker, leave_deleted_directory
from dask_gpu_mpi.agent.orders import Answer, Configuration
from dask_gpu_mpi.agent.serve import Agent
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import away_from_here
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import UNCONFIGURED
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.gpu_probe import collect
from dask_gpu_mpi.machine.scratch import make_scratch, remove_scratch
from dask_gpu_mpi.network.ucx import (
    connection_config,
    extend_handshakes,
    import_ucx,
    missing_ucx,
    transfer_config,
)
from dask_gpu_mpi.options.dask_config import import_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.worker_class import tasks_run_in_agent

#: What workers need; `distributed` alone leaves these to the first use, once in every worker.
PRELOAD = ("distributed", "distributed.nanny", "distributed.worker", "distributed.scheduler")
#: What they and the scheduler import by and by, after that: a dozen files for each of them. Some are gone in other versions.
PRELOAD_LATER = (
    "numpy.random",
    "multiprocessing.popen_forkserver",
    "multiprocessing.synchronize",
    "tornado.platform.asyncio",
    "dask_gpu_mpi.agent.dashboard_gate",
    "dask_gpu_mpi.workers.plugins",
    *(
        f"distributed.http.{name}"
        for name in ("worker", "worker.prometheus", "prometheus", "health", "statics")
    ),
    *(f"distributed.http.scheduler{name}" for name in ("", ".prometheus", ".info", ".json")),
)
#: Seconds that UCX may take for its hooks: it takes one.
HOOKS = 60.0


def run(
    control: int,
    reply: int,
    timeline: Timeline,
    *,
    cuda: bool,
    hooks: threading.Thread | None,
    look: int | None,
) -> None:
    """Import, be configured, fork, and serve until the control pipe ends.

    Parameters
    ----------
    control, reply : int
        File descriptors of orders and answers.
    timeline : Timeline
        Of this process.
    cuda : bool
        Whether to import dask_cuda.
    hooks : threading.Thread or None
        What puts UCX's hooks into CUDA's library.
    look : int or None
        The child that probes the GPUs.
    """
    _import_dask(cuda=cuda)
    timeline.lap("import")
    if hooks is not None:
        hooks.join(HOOKS)
        if hooks.is_alive():  # nothing that is forked may have half of them
            raise DaskGpuMpiError(
                f"UCX has not put its hooks into CUDA's library within {HOOKS:g} s",
                fix="have the environment on a faster file system or in a container image, or choose --protocol tls",
            )
        timeline.lap("wait for UCX's hooks")
    reader = FrameReader(control)
    frames: list[Any] = []
    while not frames:
        frames = reader.read(timeout=UNCONFIGURED)
        if reader.eof:
            return
    configuration, *orders = frames
    if not isinstance(configuration, Configuration):
        return  # the rank closes already
    scratch: str | None = None
    try:
        try:
            scratch, read = _configure(configuration.options, configuration.dask_config)
            configuration = replace(configuration, options=read)
            become_resource_tracker([control, reply], scratch)
            make_scratch(scratch)
            timeline.lap("configure")
            own_server = become_fork_server(scratch, [control, reply], (*PRELOAD, *PRELOAD_LATER))
            gc.enable()
            timeline.lap("fork")
        except DaskGpuMpiError as error:
            write_frame(reply, (Answer.FAILED, error.problem, error.exit_code, type(error).__name__))
            return
        if look is not None:  # threads are allowed now; inside the driver it may hang
            threading.Thread(target=collect, args=(look,), name="look", daemon=True).start()
        tasks_here = tasks_run_in_agent(configuration.options.worker_class)
        if not tasks_here:
            _leave_gpus_alone()
            # From here on the control pipe tells, and leaves time to clean up; a task inside the agent could keep it unread.
            die_with_parent(0)
        write_frame(reply, (Answer.PREPARED, scratch))
        agent = Agent(
            configuration, scratch, reader, reply, timeline, own_server=own_server, tasks_here=tasks_here
        )
        asyncio.run(agent.run(orders))
    finally:
        _end_children()
        if scratch is not None:
            # workers that were killed a moment ago may still be writing there
            remove_scratch(scratch, within=configuration.options.shutdown_timeout)


def _import_dask(*, cuda: bool) -> None:
    """What every process that is forked from here shares."""
    import_config()
    for name in PRELOAD:
        importlib.import_module(name)
    if cuda:
        # Where it is missing or broken, the first GPU worker reports it; there may be none.
        with contextlib.suppress(Exception):
            importlib.import_module("dask_cuda")
    for name in PRELOAD_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Every worker tells the scheduler; what it has found out it keeps: eight files, and `uname`.
    with contextlib.suppress(AttributeError, KeyError):
        sys.modules["distributed.versions"].get_versions()


def _configure(options: Options, dask_config: dict[str, Any]) -> tuple[str, Options]:
    """Settle what must be settled before the fork.

    Returns
    -------
    tuple
        The scratch directory, which is still to be made, and the options with those of the workers read.
    """
    import dask

    from dask_gpu_mpi.workers.worker_options import read_worker_options

    with contextlib.suppress(ImportError, AttributeError):  # in another version of distributed
        importlib.import_module("dask_gpu_mpi.network.listeners").guard_listeners()
    dask.config.update(dask.config.config, dask_config, priority="new")
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    listen_where_routes_are()
    if not asks_for_server(options.worker_options):
        dask.config.set(NO_WORKER_ROUTES)
    worker_options = read_worker_options(options.worker_class, options.worker_options, where="worker_options")
    needs_ucx = options.protocol.moves_device_memory or options.worker_ucx is WorkerUcx.ALL
    if needs_ucx and (missing := missing_ucx(device_memory=False)):
        raise InputError(
            f"protocol 'ucx': {missing.text}", fix=f"{missing.fix}; or leave protocol (--protocol) out"
        )
    if options.protocol.moves_device_memory:
        dask.config.set(connection_config(options.worker_options) | transfer_config())
        with away_from_here():
            import_ucx()
        extend_handshakes()
    if options.protocol.encrypts and sys.platform == "linux":  # on macOS it may start threads
        # Reads the certificates of all the world's authorities, which nobody here asks for, once in each process: 20 ms.
        # In older versions of tornado it is no function, and is read when that is imported.
        if callable(read := getattr(sys.modules.get("tornado.netutil"), "_client_ssl_defaults", None)):
            read()
    # distributed.utils.get_mp_context imports every optional package it knows (pandas and friends, a second) before it starts
    # a fork server; ours is there already.
    sys.modules["distributed.utils"]._forkserver_preload_set = True  # type: ignore[attr-defined]
    parent = options.local_directory or dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    leave_deleted_directory()
    scratch = os.path.join(os.path.abspath(parent), f"dgm-{os.urandom(8).hex()}")
    # Everything of Dask's, the scheduler's as well, goes where it is removed at the end.
    dask.config.set({"temporary-directory": scratch})
    logs.set_up(options.log_level, scratch, quiet_stream=options.log_directory is not None)
    return scratch, replace(options, worker_options=worker_options)


def _leave_gpus_alone() -> None:
    """Have the nannies here ask nothing of NVML, once and for all: they have no GPU, and wait for each other in the driver.

    By way of the configuration, which is read once and is as it was for the workers.
    """
    import dask

    with (
        dask.config.set({"distributed.diagnostics.nvml": False}),
        contextlib.suppress(ImportError, AttributeError),
    ):
        importlib.import_module("distributed.diagnostics.nvml").init_once()


def _end_children() -> None:
    """End what tasks in this process have left running, pools for example, as Python does at its exit, which is left out here."""
    for process in active_children():
        if process.daemon:
            with contextlib.suppress(OSError):
                process.terminate()
