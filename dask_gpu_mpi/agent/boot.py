"""The first moments of an agent: it starts here what can run while it imports Dask, which takes most of a second.

`handle.AgentProcess` starts a Python that calls `main`, which goes on in `agent.main` after the first frame of the rank. So this
module itself imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
from typing import NamedTuple

from dask_gpu_mpi.base.frames import read_frame, write_frame
from dask_gpu_mpi.base.signals import die_with_parent, ignore_signals, kept
from dask_gpu_mpi.base.streams import flush, open_missing, print_by_line, raise_descriptor_limit
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import UNCONFIGURED

#: Modules that distributed imports. Each takes some hundredths of a second, so the first frame is read soon after it arrives.
WAITING = (
    "asyncio", "ssl", "yaml", "jinja2", "psutil", "tlz", "cloudpickle", "click", "tornado.ioloop", "msgpack", "numpy",
)  # fmt: skip


class Begin(NamedTuple):
    """The first frame, sent before the configuration is known."""

    #: Whether the agent imports dask_cuda as well.
    cuda: bool
    #: Whether a child of it inspects the GPUs.
    inspect: bool


def main(control: int, *, rank: int, follow: bool, ranks_end: int) -> None:
    """Run the agent; never returns.

    `control`: the socket to the rank. `rank`: its process id. `follow`: this process dies with the rank's main thread.
    `ranks_end`: the number (inode) of the socket's other end.
    """
    _prepare_process()
    if follow:
        die_with_parent(rank)
    os.set_inheritable(control, False)
    _import_until_readable(control)
    begin = read_frame(control, UNCONFIGURED)
    if not isinstance(begin, Begin):
        os._exit(0)  # the rank has ended, or sends nothing
    gpu_answer, gpu_inspector = None, None
    if begin.inspect:
        from dask_gpu_mpi.machine.gpu_probe import Look, start_look

        read, write = os.pipe()
        gpu_answer = Look(read)
        with contextlib.suppress(OSError), kept():  # if no process can be started, there is no answer
            gpu_inspector = start_look(write, close=[read, control], rank=rank)
    if begin.cuda:
        # RAPIDS libraries must not make a context in the process from which all workers are forked.
        os.environ["RAPIDS_NO_INITIALIZE"] = "True"
    timeline = Timeline("agent")
    timeline.lap("python")
    code = 0
    try:
        from dask_gpu_mpi.agent.main import run

        run(
            control,
            timeline,
            rank=rank,
            ranks_end=ranks_end,
            cuda=begin.cuda,
            gpu_answer=gpu_answer,
            gpu_inspector=gpu_inspector,
        )
    except ConnectionError:
        pass  # the rank is gone
    except BaseException as error:
        from dask_gpu_mpi.base.failures import Failure
        from dask_gpu_mpi.startup.messages import Kind

        code = 1
        with contextlib.suppress(OSError):
            write_frame(control, (Kind.FAILED, Failure.of(error)))
    finally:
        flush()  # tasks may run in this process, and plugins of nannies
        os._exit(code)


def _prepare_process() -> None:
    # The fork server, which this process becomes, learns by it that workers have died; the launcher or the script may block it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # Imported modules stay, and the collections of garbage would be a tenth of the import.
    gc.disable()
    open_missing()
    print_by_line()
    ignore_signals()
    raise_descriptor_limit()


def _import_until_readable(control: int) -> None:
    """Import modules until there is something to read; no thread is started by that, and no device is used."""
    for name in WAITING:
        if select.select([control], [], [], 0)[0]:
            break
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
