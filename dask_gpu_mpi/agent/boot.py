"""The first moments of an agent: it starts here what can run while it imports Dask, which takes most of a second.

So this module itself imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import threading

from dask_gpu_mpi.agent.orders import Begin, failed
from dask_gpu_mpi.base.frames import read_frame, write_frame
from dask_gpu_mpi.base.signals import die_with_parent, ignore_signals, kept
from dask_gpu_mpi.base.streams import flush, open_missing, print_by_line, raise_descriptor_limit
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import UNCONFIGURED
from dask_gpu_mpi.network.ucx import install_hooks, load_library

#: Modules that distributed imports. Each takes some hundredths of a second, so the first frame is read soon after it arrives.
WAITING = (
    "asyncio", "ssl", "yaml", "jinja2", "psutil", "tlz", "cloudpickle", "click", "tornado.ioloop", "msgpack", "numpy",
)  # fmt: skip


def main(reply: int, *, gpus: int, rank: int, follow: bool) -> None:
    """Run the agent; never returns.

    `reply` and `gpus` are file descriptors, for answers and for the GPUs that a child finds. `rank` is the process id of the
    rank. `follow`: this process dies with the thread that started it, which is the rank's main thread.
    """
    # Imported modules stay, and the collections of garbage would be a tenth of the import.
    gc.disable()
    open_missing()
    print_by_line()
    ignore_signals()
    raise_descriptor_limit()
    if follow:
        die_with_parent(rank)
    control = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd in (reply, gpus):
        os.set_inheritable(fd, False)
    for name in WAITING:  # until there is something to read; no thread is started, no device is used
        if select.select([control], [], [], 0)[0]:
            break
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    begin = read_frame(control, UNCONFIGURED)
    if not isinstance(begin, Begin):
        os._exit(0)  # the rank has ended, or sends nothing
    look = None
    if begin.inspect:
        from dask_gpu_mpi.machine.gpu_probe import start_look

        with contextlib.suppress(OSError), kept():  # if no process can be started, the rank gets no answer
            look = start_look(gpus, close=[reply, control], rank=rank)
    else:
        os.close(gpus)
    if begin.cuda:
        # RAPIDS libraries must not make a context in the process from which all workers are forked.
        os.environ["RAPIDS_NO_INITIALIZE"] = "True"
    timeline = Timeline("agent")
    timeline.lap("python")
    code = 0
    try:
        hooks: threading.Thread | None = None
        if begin.ucx and load_library():
            hooks = threading.Thread(target=install_hooks, name="UCX", daemon=True)
            hooks.start()
            timeline.lap("load UCX")
        from dask_gpu_mpi.agent.main import run

        run(control, reply, timeline, rank=rank, cuda=begin.cuda, hooks=hooks, look=look)
    except BrokenPipeError:
        pass  # the rank is gone
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            write_frame(reply, failed(error))
    finally:
        flush()  # tasks may run in this process, and plugins of nannies
        os._exit(code)
