"""A fork server that has already imported everything, forked from the agent.

`multiprocessing`'s fork server is a new interpreter, which would import everything again, for every rank. On a laptop with two
cores, or on a thousand hosts with one file system, that is most of the start. So the agent imports once, while it has one thread,
and then forks: the child becomes the fork server, the parent stays the agent. Both share their pages, and every worker starts
from them in milliseconds. `multiprocessing`'s resource tracker is made in the same way.

`agent.main` calls `become_resource_tracker`, then `become_fork_server`. Both fork, and run loops of the standard library there.
The clients of these are replaced in the agent: a function, and a private attribute of the tracker. Python and Dask then start
processes by `multiprocessing` as ever. At the end `agent.part` ends what tasks have left (`end_left_behind`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import active_children, current_process, resource_tracker, util
from multiprocessing import forkserver as stdlib
from typing import Any

import psutil

from dask_gpu_mpi.base.signals import (
    NUMBERS,
    action_before,
    adopt_orphans,
    die_with_parent,
    end_programs,
    is_ours,
    kept,
    running,
)
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.base.timeouts import KILLING, TASKS_PROGRAMS
from dask_gpu_mpi.machine.scratch import remove_scratch

#: The client of `multiprocessing`'s resource tracker.
_tracker: Any = resource_tracker._resource_tracker
#: How the names of the processes begin that leave signals to the rank: ours for the scheduler, distributed's for workers.
_OURS = ("dask_gpu_mpi ", "Dask Worker ")


@dataclass(frozen=True)
class _Server:
    """The fork server of this process."""

    pid: int
    #: Its socket's name in this process.
    address: str
    #: The pipe whose other end the server alone has: all clients have this end, and the server ends after the last of them.
    alive: int

    def connect(self, fds: Sequence[int]) -> tuple[int, int]:
        """Let the server fork a child that inherits these descriptors; replaces the standard ``connect_to_new_process``.

        Returns the pipe from which the child's process id and later its exit code are read, and the pipe for its work.
        """
        with contextlib.ExitStack() as unless_sent, socket.socket(socket.AF_UNIX) as client:
            client.connect(self.address)
            status, childs_status = os.pipe()
            childs_work, work = os.pipe()
            for fd in (status, work):
                unless_sent.callback(os.close, fd)
            try:
                sent = [childs_work, childs_status, self.alive, _tracker._fd, *fds]
                socket.send_fds(client, [bytes([len(sent) % 256])], sent)
            finally:
                os.close(childs_work)
                os.close(childs_status)
            unless_sent.pop_all()
        return status, work


#: None: there is none yet.
_server: _Server | None = None


def become_fork_server(directory: str, close: Sequence[int]) -> None:
    """Fork the server of this process's future children.

    Call it from the main thread, before any other thread is started, and after `become_resource_tracker`. The server's socket is
    in `directory`, which other users can't read. It closes the descriptors of `close`, by which this process's end is noticed.
    """
    global _server
    flush()
    # The garbage collector ignores the objects of now, in this process and in all that it forks. Otherwise its first run would
    # write into every page, and the processes would no longer share them.
    gc.freeze()
    # Short, since a socket's name has 107 bytes at most (unix(7)), and valid in this process, which alone calls the server.
    address = f"/proc/self/fd/{os.open(directory, os.O_PATH)}/fork-server"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen(64)
        alive_r, alive_w = os.pipe()
        parent = os.getpid()
        with kept():
            pid = os.fork()
        if pid == 0:
            _serve(listener, alive_r, [alive_w, *close], parent)
        os.close(alive_r)
    _server = _Server(pid, address, alive_w)
    # If it dies, no other replaces it: its children would have neither our loggers nor our signal handlers.
    stdlib.connect_to_new_process = _server.connect


def watch_fork_server(loop: asyncio.AbstractEventLoop, on_end: Callable[[], object]) -> None:
    """Call `on_end` when the fork server of this process has ended, and with it all that it has forked."""
    assert _server is not None
    # The server alone has the other end of this pipe: when that is closed, epoll reports an error on this one.
    loop.add_reader(_server.alive, on_end)


def _serve(listener: socket.socket, alive_r: int, close: Sequence[int], parent: int) -> None:
    """The child's side: never returns."""
    code = 1
    try:
        die_with_parent(parent)
        adopt_orphans()
        warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of an orphan
        gc.enable()
        for fd in close:
            os.close(fd)
        me = os.getpid()
        #: 0 in the server, 1 in a process that it has just forked, 2 in one that has begun, and in those that this one forks.
        generation = [0]

        def in_child() -> None:
            # Only processes that the server itself forks: one that a task forks must not die with the task's thread.
            if generation[0] == 0:
                generation[0] = 1
                die_with_parent(me)

        def begin(_: object) -> None:
            if generation[0] == 1:
                generation[0] = 2
                _settle_signals()

        os.register_at_fork(after_in_child=in_child)
        # In its children too, until `_settle_signals`: no signal is lost in the meantime.
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        util.register_after_fork(begin, begin)
        with kept():
            stdlib.main(listener.detach(), alive_r, [])
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _settle_signals() -> None:
    """Unblock signals in a new process. If a task of an in-process worker starts it, it gets the default actions first.

    A `Pool` ends such processes by SIGTERM.
    """
    if not current_process().name.startswith(_OURS):
        for number in NUMBERS:
            if is_ours(number):
                action_before(number).restore()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


# The resource tracker of `multiprocessing`.


def become_resource_tracker(close: Sequence[int], scratch: str | None = None) -> int:
    """Fork `multiprocessing`'s resource tracker, which closes these descriptors and removes `scratch` at its end.

    Returns its process id.

    It ends last, and removes the semaphores of processes that were killed. As a new interpreter, as the standard library
    starts it, it would open 117 files and need 9 MiB; a fork opens none and shares its pages. Make `scratch` after this
    call: then there is always a process that removes it.
    """
    read, write = os.pipe()
    with kept():
        pid = os.fork()
    if pid == 0:
        _track(read, [write, *close], scratch)
    os.close(read)
    _tracker._fd = write
    return pid


def _track(read: int, close: Sequence[int], scratch: str | None) -> None:
    """The tracker's side: never returns before all processes of this rank have ended."""
    try:
        for fd in close:
            os.close(fd)
        # Slurm sends the warning before the walltime to every process; the tracker must outlive it.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        # It warns of each semaphore, which is no help at the end of a killed job; and a launcher waits for the end of both.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        with contextlib.suppress(SystemExit):  # Python 3.13
            resource_tracker.main(read)
        if scratch is not None:
            remove_scratch(scratch, within=2.0)
    finally:
        os._exit(0)


# Programs that tasks have left behind: they are children of the fork server, which adopts orphans.


def end_left_behind() -> None:
    """End the processes that tasks have started, and that are still there after the workers; print which they were.

    A launcher waits until no process has the job's output open, until the walltime if it must.
    """
    until = time.monotonic() + KILLING  # for workers that were killed
    while any(each.name.startswith(_OURS[1]) for each in active_children()) and time.monotonic() < until:
        time.sleep(0.01)
    ours = {each.pid for each in active_children()}
    if (server := _server) is None:  # psutil would take None for this process, and end its resource tracker
        return

    def left() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return running([each for each in psutil.Process(server.pid).children() if each.pid not in ours])
        return []

    end_programs(left, "tasks", "the workers", leaving=TASKS_PROGRAMS, killing=TASKS_PROGRAMS)
