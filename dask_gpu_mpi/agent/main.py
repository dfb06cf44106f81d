"""An agent: it imports Dask, is configured, forks its fork server, and then does its rank's part in the job (`part.Part`).

`handle.AgentProcess` starts it, through `boot`, without MPI and without the launcher's variables. Its `__main__` is empty, so
the user's script never runs again in a worker. It is connected to its rank by a socket. At end of file the rank has ended or
closes the agent, and everything here ends within the grace. Standard output and error are the rank's, for what tasks print.

The order matters: import while there is one thread, then configure, then fork the fork server, then start the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
import warnings
from dataclasses import replace
from multiprocessing import active_children
from typing import Any

import dask.config
import psutil

from dask_gpu_mpi.agent.forkserver import become_fork_server, become_resource_tracker, watch_fork_server
from dask_gpu_mpi.agent.part import Part
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.signals import (
    die_with_parent,
    end_programs,
    kept,
    rank_that_started,
    running,
    sockets_of,
)
from dask_gpu_mpi.base.streams import leave_deleted_directory, say
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import SAVING, SCRIPTS_PROGRAMS, UNCONFIGURED
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.gpu_probe import Look, collect
from dask_gpu_mpi.machine.nvidia import is_profiled
from dask_gpu_mpi.machine.scratch import local_directory, make_scratch, remove_scratch
from dask_gpu_mpi.network.listeners import NO_WORKER_ROUTES, guard_listeners, requests_http_server
from dask_gpu_mpi.network.ucx import missing_ucx
from dask_gpu_mpi.options.convert import import_config, is_configured
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.sites.batch import batch_job
from dask_gpu_mpi.startup.messages import Configuration, Kind
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.plugins import SAFE_PATH
from dask_gpu_mpi.workers.worker_options import follow_cudf_spill, read_worker_options, tasks_run_in_agent

logger = logging.getLogger("dask_gpu_mpi")

#: Modules that workers need; `distributed` alone imports these at the first use, in every worker again.
PRELOAD = ("distributed", "distributed.nanny", "distributed.worker", "distributed.scheduler")
#: Modules that workers and the scheduler import later: a dozen files for each process. Other versions do not have all of them.
PRELOAD_LATER = (
    "cryptography",
    "numpy.random",
    "multiprocessing.popen_forkserver",
    "multiprocessing.synchronize",
    "tornado.platform.asyncio",
    *(
        f"distributed.http.{name}"
        for name in ("worker", "worker.prometheus", "prometheus", "health", "statics")
    ),
    *(f"distributed.http.scheduler{name}" for name in ("", ".prometheus", ".info", ".json")),
)


def run(
    control: int,
    timeline: Timeline,
    *,
    rank: int,
    ranks_end: int,
    cuda: bool,
    gpu_answer: Look | None,
    gpu_inspector: int | None,
) -> None:
    """Import (with `cuda`, dask_cuda too), be configured, fork, and serve until the rank ends.

    `control`: the socket to the rank. `ranks_end`: the number (inode) of its other end. `rank`, `gpu_inspector`: process ids of
    the rank, and of the child that inspects the GPUs.
    """
    of_rank = psutil.Process(rank)
    _import_dask(cuda=cuda)
    timeline.lap("import")
    reader = FrameReader(control)
    frames: list[Any] = []
    while not frames:
        frames = reader.read(timeout=UNCONFIGURED)
        if reader.eof:
            return
    configuration, *frames = frames
    if not isinstance(configuration, Configuration):
        return  # the rank closes already
    scratch: str | None = None
    try:
        try:
            scratch, read = _configure(configuration.options, configuration.dask_config)
            configuration = replace(configuration, options=read)
            # These descriptors are for this process alone. ENTER may have come already, with the hub's socket.
            close = [control, *([] if gpu_answer is None else [gpu_answer.fd]), *reader.fds]
            become_resource_tracker(close, scratch)
            make_scratch(scratch)
            timeline.lap("configure")
            become_fork_server(scratch, close)
            gc.enable()
            timeline.lap("fork")
        except DaskGpuMpiError as error:
            write_frame(control, (Kind.FAILED, Failure.of(error)))
            return
        if gpu_inspector is not None:  # threads are allowed now; the child may hang in the driver
            threading.Thread(target=collect, args=(gpu_inspector,), name="look", daemon=True).start()
        if not tasks_run_in_agent(configuration.options.worker_class):
            # From here on the end of the control pipe and the check of the parent are enough, and leave time to clean up. (With
            # tasks in this process they are not: a task could keep the event loop busy.)
            die_with_parent(0)
        write_frame(control, (Kind.PREPARED, scratch))

        async def serve() -> None:
            part = Part(configuration, scratch, reader, control, timeline, rank=rank, gpu_answer=gpu_answer)
            watch_fork_server(asyncio.get_running_loop(), _on_fork_server_end)
            await part.run(frames)

        asyncio.run(serve())
    finally:
        _end_pools()
        if scratch is not None:
            # workers that were killed a moment ago may still write there
            remove_scratch(scratch, within=configuration.options.shutdown_timeout)
        if configuration.ends_forks:
            _end_left_by_script(of_rank, ranks_end, by_environment=configuration.ends_programs)


def _import_dask(*, cuda: bool) -> None:
    """Import the modules that all processes forked from here share."""
    import_config()
    for name in PRELOAD:
        importlib.import_module(name)
    if cuda:
        # If it is missing or broken, the first GPU worker reports that; there may be none.
        with contextlib.suppress(Exception):
            importlib.import_module("dask_cuda")
    for name in PRELOAD_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _configure(options: Options, dask_config: dict[str, Any]) -> tuple[str, Options]:
    """Make all settings that belong before the fork; returns the scratch directory, not made yet, and the options as read."""
    guard_listeners()
    dask.config.update(dask.config.config, dask_config, priority="new")
    method = "spawn" if is_profiled(os.environ) else "forkserver"
    if method == "spawn":
        # A new Python searches the working directory first, where another user may have put a module. `prepare_new_process`
        # removes the variable.
        os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH") or SAFE_PATH
    dask.config.set({"distributed.worker.multiprocessing-method": method})
    if not is_configured("distributed.worker.daemon"):
        # Tasks and members of gangs may start pools and data loaders, which daemons may not. `end_left_behind` ends the rest.
        dask.config.set({"distributed.worker.daemon": False})
    if not requests_http_server(options.worker_options):
        dask.config.set(NO_WORKER_ROUTES)
    worker_options = read_worker_options(options.worker_class, options.worker_options)
    follow_cudf_spill(worker_options)  # for the scheduler
    if options.worker_ucx is WorkerUcx.ALL and (missing := missing_ucx(device_memory=False)):
        raise InputError(
            f"protocol 'ucx': {missing.text}", fix=f"{missing.fix}; or leave protocol (--protocol) out"
        )
    # Otherwise get_mp_context imports every optional package (pandas and others, a second) for a fork server. Ours runs already.
    sys.modules["distributed.utils"]._forkserver_preload_set = True  # type: ignore[attr-defined]
    parent = local_directory(options.local_directory)
    leave_deleted_directory()
    scratch = os.path.join(os.path.abspath(parent), f"dgm-{os.urandom(8).hex()}")
    # All of Dask's files, the scheduler's too, go into the directory that is removed at the end.
    dask.config.set({"temporary-directory": scratch})
    logs.set_up(options.log_level, scratch, quiet_stream=options.log_directory is not None)
    return scratch, replace(options, worker_options=worker_options)


def _end_pools() -> None:
    """End processes, such as pools, that tasks in this process have left: Python does so at its exit, which is left out here."""
    for process in active_children():
        if process.daemon:
            with contextlib.suppress(OSError):
                process.terminate()


def _on_fork_server_end() -> None:
    """No process can be started here any more, and those that were have died: the rank starts another agent."""
    say(f"an agent on {socket.gethostname()} ends: its fork server has died")
    os._exit(1)


# Programs that the script has left behind.


def _end_left_by_script(rank: psutil.Process, ranks_end: int, *, by_environment: bool) -> None:
    """Fork a process that waits for the end of the rank, and then ends the programs that its script has started, if any.

    `by_environment`: all programs, and not only forks of the rank. The process keeps the job's standard error open, so that the
    launcher waits for it.
    """
    found = _programs_of_script(rank, ranks_end, by_environment=by_environment)
    if not found:
        return
    with warnings.catch_warnings(), kept():
        warnings.simplefilter("ignore")  # other threads do not matter to a process that ends by os._exit
        if os.fork():
            return
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2:
                with contextlib.suppress(OSError):  # the folder's own
                    os.close(fd)
        with contextlib.suppress(psutil.Error):
            while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)

        def left() -> list[psutil.Process]:
            found[:] = running(found)
            return found

        end_programs(left, "the script", "it", leaving=SCRIPTS_PROGRAMS, killing=SAVING)
    finally:
        os._exit(0)


def _programs_of_script(
    rank: psutil.Process, ranks_end: int, *, by_environment: bool
) -> list[psutil.Process]:
    """The programs that a rank's script has started: by their environment, and by descent as long as the rank lives.

    Its forks, whose environment is that with which the rank was started, have its end of the socket to this agent.
    """
    me = psutil.Process()
    own = {me.pid, rank.pid, *(each.pid for each in me.children(recursive=True))}
    found: list[psutil.Process] = []
    if by_environment:
        with contextlib.suppress(psutil.Error):
            found += rank.children(recursive=True)
    jobs = ("", batch_job(os.environ))
    for pid in {*psutil.pids()} - own:
        with contextlib.suppress(psutil.Error):
            each = psutil.Process(pid)
            # One that an earlier rank of this number has left is older than this rank.
            if each.create_time() < rank.create_time():
                continue
            if by_environment and rank_that_started(pid) == str(rank.pid):
                # A batch job that the script has submitted has the script's environment, and may run on this node already.
                if batch_job(each.environ()) in jobs:
                    found.append(each)
            elif _has_socket(pid, ranks_end):
                found.append(each)
    return [each for each in running(found) if each.pid not in own]


def _has_socket(pid: int, number: int) -> bool:
    """Whether a process has this socket open."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return any(number == found for _, found in sockets_of(pid))
    return False
