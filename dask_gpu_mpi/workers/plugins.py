"""The plugins of workers, by which this package acts in a worker's process; `workers.factory` chooses them for each worker.

`distributed` sends them to the process by pickle, with the worker's other options. It calls `setup` when the worker is made, and
`transition` at each change of a task's state. In the order of the sections here they

- call a function in the process (`InWorker`, `BeforeWorker`), to prepare it or to end it;
- measure the worker for `top` and the report, and mark tasks for a profiler (`Figures`, `TransferSizes`, `TaskRanges`);
- complete the errors of tasks, and keep the private key in the process (`Label`, `FailedTransfers`, `KeylessDump`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from multiprocessing import current_process, util
from typing import Any

from dask.utils import key_split
from distributed import Worker
from distributed.diagnostics import nvml
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import pickle
from distributed.worker_state_machine import TaskErredMsg

from dask_gpu_mpi.base.signals import die_with_parent, ignore_signals
from dask_gpu_mpi.base.streams import print_by_line
from dask_gpu_mpi.base.timeline import METRIC
from dask_gpu_mpi.machine.nvidia import FIGURES, NO_GPU, device_figures
from dask_gpu_mpi.network.listeners import guard_listeners
from dask_gpu_mpi.network.ucx import PREFERS_SYSTEM
from dask_gpu_mpi.network.ucx_endpoint import Ucx
from dask_gpu_mpi.network.worker_comm import use_ucx_between_workers
from dask_gpu_mpi.workers.logs import set_up

#: The name that distributed's Nanny gives to the process of its worker.
WORKER_PROCESS = "Dask Worker process"


class InWorker(WorkerPlugin):
    """Calls a function with these arguments in a worker's process when the worker is made, in the thread of its event loop.

    That thread later starts the threads of tasks.
    """

    def __init__(self, function: Callable[..., object], *arguments: Any, **named: Any) -> None:
        self.name = f"dask_gpu_mpi-{function.__name__}"
        self.function = function
        self.arguments = arguments
        self.named = named

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self.function(*self.arguments, **self.named)


class BeforeWorker(InWorker):
    """Calls the function when the worker's process receives this plugin: the worker is made afterwards, and then listens."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A client that fetches the plugins of a worker, by `client.run` for example, unpickles this as well.
        if current_process().name.startswith(WORKER_PROCESS):
            self.function(*self.arguments, **self.named)

    def setup(self, worker: Worker) -> None:
        """Nothing is left to do."""


# The process of a worker: functions for these two, and what the worker does for the script.

#: The value of PYTHONSAFEPATH by which an agent starts new processes; any other is the user's.
SAFE_PATH = "dask_gpu_mpi"
#: Seconds between a worker's start and that of its UCX, if no connection needs UCX before. UCX's start takes a second of the
#: process, which must delay neither the cluster's start nor a short job.
START_UCX_AFTER = 1.0
#: Seconds between a worker's start and its imports for the script.
IMPORT_AFTER = 0.05


def prepare_new_process(level: str, scratch: str, *, quiet_stream: bool) -> None:
    """Do in a process that is not forked what the agent does before it forks one; for the arguments see `logs.set_up`."""
    # The agent's thread that has started this process lives until distributed has noticed the process's end.
    die_with_parent(os.getppid())
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]
    print_by_line()
    ignore_signals()
    guard_listeners()
    set_up(level, scratch, quiet_stream=quiet_stream)


def offer_ucx(host_frames: int, *, system: str | None, **ways: Any) -> None:
    """Let the worker offer UCX to other workers; for all but `system` see `network.worker_comm.use_ucx_between_workers`.

    `system`: the agent's value of the variable by which the worker loads the system's UCX; the fork server may be older.
    """
    if system is not None:
        os.environ.setdefault(PREFERS_SYSTEM, system)
    use_ucx_between_workers(host_frames, **ways)


def start_ucx_later() -> None:
    """Start the worker's UCX after a while, if no connection does."""
    asyncio.get_running_loop().call_later(START_UCX_AFTER, Ucx.begin)


class ImportsOfScript(WorkerPlugin):
    """Imports these modules as soon as the worker is there: the script, which names them, imports them at the same time.

    The event loop's thread imports them, which also reads tasks: cuDF fails if one thread imports it while another imports a part
    of it.
    """

    name = "dask_gpu_mpi-imports-of-script"

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process, when the worker has almost started."""
        self._task = asyncio.ensure_future(self._import(worker))

    async def _import(self, worker: Worker) -> None:
        while worker.status.name == "init":
            await asyncio.sleep(IMPORT_AFTER)
        await asyncio.sleep(IMPORT_AFTER)  # its nanny, whose message another thread sends, has to know
        # It started in the middle of the job, and the thread of a task may import them now.
        if worker.state.tasks:
            return
        for module in self.modules:
            with contextlib.suppress(Exception, SystemExit):  # a task that needs it shows the error
                import_module(module)
        gc.freeze()  # as the agent does before it forks workers: they stay until the worker ends, which is then sooner


def end_as_python() -> None:
    """Let a worker's process end as any Python does: with `atexit` handlers and finalizers, and files that are open written out.

    A fork server's child leaves by ``os._exit`` once its function has returned.
    """
    if current_process().name.startswith(WORKER_PROCESS):
        util.Finalize(None, _end, exitpriority=-1000)  # the last of multiprocessing's own


def _end() -> None:
    if (colorama := sys.modules.get("colorama.initialise")) is not None:
        # Numba's use of it: an escape sequence in the job's output, for which Open MPI has a terminal.
        atexit.unregister(colorama.reset_all)
    if sys.exc_info()[1] is None:  # else multiprocessing prints the error
        ctypes.pythonapi.Py_Exit(0)


# Figures of a worker, in its heartbeats and with its finished tasks.

#: Seconds between measurements of the bytes over PCIe: one takes 40 ms, in which the driver may serve no one else.
PCIE_EVERY = 10.0


class Figures(WorkerPlugin):
    """Adds the metric `METRIC` to the heartbeats of a worker with these GPUs (UUIDs).

    - ``time``: seconds since the epoch;
    - ``sent``, ``received``: bytes of task data exchanged with other workers since the worker's start;
    - ``spilled``: bytes of device memory that are kept in host memory, or None; only if distributed does not measure it;
    - ``gpus``: for each of its GPUs those of `machine.nvidia.device_figures`, NVLink's as bytes per second, and PCIe's of every
      `PCIE_EVERY` seconds.
    """

    name = "dask_gpu_mpi-figures"

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._received = 0
        self._transfers = TransferLog()
        self._gpus = [_GpuFigures(device) for device in devices]

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        worker.metrics[METRIC] = self.measure

    async def measure(self, worker: Any) -> dict[str, Any]:
        """Measure the figures."""
        self._received += sum(transfer["total"] for transfer in self._transfers.new(worker))
        figures: dict[str, Any] = {
            "time": time.time(),
            "sent": worker.transfer_outgoing_bytes_total,
            "received": self._received,
        }
        if not hasattr(worker.data, "spilled_total"):
            figures["spilled"] = spilled_from_device(worker.data)
        if self.devices and nvml.device_get_count():
            # not in Dask's thread for large messages, which would have to wait
            figures["gpus"] = await asyncio.to_thread(lambda: [gpu.measure() for gpu in self._gpus])
        return figures


class _GpuFigures:
    """Measures one GPU: the last bytes over NVLink, from which a rate is computed, and the last rate over PCIe."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._link: float | None = None
        #: When they were read; None: never.
        self._link_time: float | None = None
        self._pcie: float | None = None
        self._pcie_due = 0.0

    def measure(self) -> list[float | None]:
        """The values of `FIGURES`."""
        # not the first time, when its scheduler waits for the worker
        measures_pcie = self._link_time is not None and time.monotonic() >= self._pcie_due
        figures = dict(zip(FIGURES, device_figures(self._device, throughput=measures_pcie), strict=True))
        now = time.monotonic()
        if measures_pcie:
            self._pcie, self._pcie_due = figures["pcie"], now + PCIE_EVERY
        rate = self._link_rate(figures["nvlink"], now)
        return [*{**figures, "pcie": self._pcie, "nvlink": rate}.values()]

    def _link_rate(self, link: float | None, now: float) -> float | None:
        """Bytes per second over NVLink since the last call; None: not known. The driver may begin to count again."""
        before, last = self._link, self._link_time
        self._link, self._link_time = link, now
        if link is None or before is None or last is None or link < before or now <= last:
            return None
        return (link - before) / (now - last)


def spilled_from_device(data: Any) -> int | None:
    """Bytes of device memory that dask-cuda's ``DeviceHostFile`` keeps in host memory; None: not known."""
    try:
        host = data.host_buffer.fast
        from_device = [key for key, value in host.d.items() if type(value).__name__ == "DeviceSerialized"]
        return int(sum(host.weights[key] for key in from_device))
    except AttributeError:  # another class, another version, or no limit of host memory
        return None


class TransferLog:
    """Reads a worker's log of what it has fetched from others, each entry once; the log is short."""

    def __init__(self) -> None:
        #: The newest entry that has been read.
        self._last: Any = None

    def new(self, worker: Any) -> list[dict[str, Any]]:
        """The entries since the last call, the newest first."""
        newest_first = reversed(worker.transfer_incoming_log)
        found = list(itertools.takewhile(lambda entry: entry is not self._last, newest_first))
        self._last = found[0] if found else self._last
        return found


class TransferSizes(WorkerPlugin):
    """Adds the number of bytes to each transfer that a worker reports with a finished task.

    Dask reports the sender and the times. The bytes are in the worker's log of transfers, with the same times.
    """

    name = "dask_gpu_mpi-transfer-sizes"
    #: Transfers of which no task is finished yet; those of a cancelled task stay, so that the oldest are removed.
    MOST = 10_000

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self._worker: Any = worker
        self._transfers = TransferLog()
        #: By sender and begin.
        self._sizes: dict[tuple[str, float], int] = {}

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by distributed when a task's state changes, before the scheduler is informed."""
        if start not in ("executing", "long-running") or finish not in ("memory", "error"):
            return
        # an error here would fail the user's task
        with contextlib.suppress(Exception):
            for each in self._worker.state.tasks[key].startstops:
                if each["action"] == "transfer" and "nbytes" not in each:
                    each["nbytes"] = self._size(each["source"], each["start"])

    def _size(self, sender: str, start: float) -> int:
        if (sender, start) not in self._sizes:
            for entry in self._transfers.new(self._worker):
                self._sizes[entry["who"], entry["start"]] = entry["total"]
            while len(self._sizes) > self.MOST:
                del self._sizes[next(iter(self._sizes))]
        return self._sizes.pop((sender, start), 0)


class TaskRanges(WorkerPlugin):
    """Marks each task that runs, in a profile, as a range of NVTX with the prefix of the task's name."""

    name = "dask_gpu_mpi-task-ranges"

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self._nvtx = import_module("nvtx")
        self._open: dict[Any, Any] = {}

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by distributed when a task's state changes; one that is cancelled runs to its end."""
        if finish == "executing" and key not in self._open:
            self._open[key] = self._nvtx.start_range(message=key_split(key), domain="dask")
        elif finish not in ("executing", "long-running", "cancelled", "resumed") and key in self._open:
            self._nvtx.end_range(self._open.pop(key))


# Errors, and what a worker reveals.

#: The note on an error of CUDA that a task raises on a worker without a GPU.
GPU_FIX = (
    "this worker has no GPU (expected a GPU worker). Fix: annotate the task with resources={'GPU': 1}, or start the job with "
    "--default-workers gpu"
)


class Label(WorkerPlugin):
    """Adds the note `text` to the exception of a failed task, at the end of its traceback (PEP 678).

    The note shows where the task ran. If CUDA has found no GPU, `gpu_fix` is a second note.
    """

    name = "dask_gpu_mpi-label"

    def __init__(self, text: str, gpu_fix: str = "") -> None:
        self.text = text
        self.gpu_fix = gpu_fix

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by distributed when a task's state changes, before the scheduler is informed."""
        if finish != "error" or start == "memory":
            return
        try:
            carried: Any = self._worker.state.tasks[key].exception
            error = pickle.loads(carried.data)
            error.add_note(self.text)
            if self.gpu_fix and NO_GPU.search(f"{type(error).__name__}: {error}"):
                error.add_note(self.gpu_fix)
            carried.data = pickle.dumps(error)
        # if the exception can't be pickled again, it stays as it is
        except Exception:
            return


class FailedTransfers(WorkerPlugin):
    """Fails tasks whose data can't be received, because there is no memory for them or they can't be deserialised.

    Without it, these tasks wait forever (distributed #6705).
    """

    name = "dask_gpu_mpi-failed-transfers"

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by distributed when a task's state changes."""
        if (start, finish) == ("flight", "error"):
            # The worker's state does not change within a change.
            asyncio.get_running_loop().call_soon(self._fail, key)

    def _fail(self, key: Any) -> None:
        data = self._worker.state.tasks.get(key)
        if data is None or data.state != "error" or data.exception is None:
            return
        stimulus = f"failed-transfer-{time.time()}"
        waiting = [task for task in data.waiters if task.state == "waiting"]
        for task in waiting:
            erred = TaskErredMsg(
                key=task.key,
                run_id=task.run_id,
                exception=data.exception,
                traceback=data.traceback,
                exception_text=data.exception_text,
                traceback_text=data.traceback_text,
                thread=None,
                startstops=task.startstops,
                stimulus_id=stimulus,
            )
            self._worker.batched_send(erred.to_dict())
        keys = [task.key for task in waiting] or [key]
        self._worker.handlers["free_keys"](keys=keys, stimulus_id=stimulus)


class KeylessDump(WorkerPlugin):
    """Leaves the private key out of ``client.dump_cluster_state()``, which writes each worker's configuration into a file."""

    name = "dask_gpu_mpi-keyless-dump"

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        dump = worker.handlers["dump_state"]

        def dump_state(*, exclude: Collection[str] = ()) -> Any:
            state = dump(exclude=exclude)
            if "config" in state:
                state["config"] = without_keys(state["config"])
            return state

        worker.handlers["dump_state"] = dump_state


def without_keys(config: Any) -> Any:
    """A configuration without texts that hold a private key.

    >>> without_keys({"tls": {"key": "-----BEGIN PRIVATE KEY-----", "ciphers": None}})
    {'tls': {'key': 'private key, left out', 'ciphers': None}}
    """
    if isinstance(config, dict):
        return {key: without_keys(value) for key, value in config.items()}
    return "private key, left out" if isinstance(config, str) and "PRIVATE KEY" in config else config
