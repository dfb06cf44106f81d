"""UCX in the processes of a cluster: whether it can be used, its configuration, and its start.

UCX itself chooses among the transports that two processes have in common. They must agree on the way to connect
(``SOCKADDR_TLS_PRIORITY``): dask-cuda sets it for its workers if one of its switches is given (``enable_nvlink`` and so on), so
it is set in the same way for the scheduler, the agents and the client. Only workers touch a GPU. See ``distributed_ucxx.ucxx``,
``_prepare_ucx_config`` and ``init_once``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.streams import away_from_here, environment
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.options.dask_config import is_configured
from dask_gpu_mpi.options.model import SWITCHES

if TYPE_CHECKING:
    import asyncio

#: The default of ``UCX_TLS``. Everyone in the job's group may write System V shared memory. TCP has a port without
#: authentication: its peers read and write any address of the process.
CLOSED = "^sysv,tcp"
#: The package that brings UCX to Dask, and the first libucx with which no release of UCXX works.
PACKAGE, LIBUCX, LIBUCX_LIMIT = "distributed_ucxx", ("libucx-cu12", "libucx-cu13"), (1, 22)
#: The sections of UCX in Dask's configuration; the second is distributed's former name.
SECTION = "distributed-ucxx"
SECTIONS = (SECTION, "distributed.comm.ucx")
#: Devices for RDMA, as the kernel lists them.
RDMA = "/sys/class/infiniband/*"
#: Devices of Slingshot 11, which UCX does not drive.
SLINGSHOT = "/sys/class/cxi/*"
#: Bytes that a worker requests of another at a time, and the default over UCX: 40 ms of a fast Ethernet, 0.1 ms of NVLink.
MESSAGE, MESSAGE_BYTES = "distributed.worker.transfer.message-bytes-limit", "2 GB"
#: The GPU vendor in UCX's names of transports, and the options of distributed-ucxx that create a context.
GPU_TRANSPORT = "cuda"
CONTEXT_OPTIONS = ("create-cuda-context", "nvlink", "cuda-copy")
#: Variables that UCX reads when its library is loaded. Up to 1.19 it prints forty lines for an error and handles Python's
#: signals. It prints errors to standard output, where the script's results are.
AT_LOAD = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"}
#: The same for MPI between nodes, whose port is open to all: UCX would print a warning for each connection of a stranger.
AT_LOAD_BETWEEN_NODES = {**AT_LOAD, "UCX_LOG_LEVEL": "error"}
#: UCM_EVENT_MEM_TYPE_ALLOC and UCM_EVENT_MEM_TYPE_FREE of ucm/api/ucm.h.
_DEVICE_MEMORY_EVENTS = 1 << 20 | 1 << 21
#: Seconds for the handshake of a connection over UCX; Dask's own deadline for connecting is shorter, and Dask tries again.
HANDSHAKE_TIMEOUT = 60.0


def missing_ucx(*, device_memory: bool) -> Problem | None:
    """The reason why workers can't use UCX (RMM is for memory of GPUs), with the fix; None: they can. Imports nothing."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    for name in (PACKAGE, "rmm") if device_memory else (PACKAGE,):
        if find_spec(name) is None:
            package = name.replace("_", "-")
            extras = "'dask-gpu-mpi[cuda12]' or 'dask-gpu-mpi[cuda13]'"
            return Problem(f"{package} is not installed", fix=f"pip install {extras}, to match the driver")
    for name in LIBUCX:
        with contextlib.suppress(PackageNotFoundError):
            found = version(name)
            if tuple(map(int, re.findall(r"[0-9]+", found)[:2])) >= LIBUCX_LIMIT:
                return Problem(f"UCXX does not work with {name} {found}", fix=f"pip install '{name}<1.22'")
    return None


@dataclass(frozen=True)
class UcxAbility:
    """Whether the workers of a rank can use UCX together with TLS."""

    #: The reason why they can't; None: they can, or need not.
    obstacle: Problem | None = None
    #: The reason why it does not lead to other nodes; empty: it does.
    between_nodes: str = ""
    #: The user's setting by which it opens a TCP port; empty: it opens none.
    opened_by: str = ""


def obstacle_between_nodes(environ: Mapping[str, str], devices: str = RDMA) -> str:
    """The reason why UCX reaches other nodes by TCP only; empty: it has RDMA."""
    if not glob.glob(devices):
        return "UCX has no transport for Slingshot" if glob.glob(SLINGSHOT) else "no RDMA device"
    if not lacks_rdma(environ, devices):
        return ""
    return "the libucx package has no InfiniBand (for a UCX of the system: RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true)"


def lacks_rdma(environ: Mapping[str, str], devices: str = RDMA) -> bool:
    """Whether this node has RDMA devices that the UCX of the environment's packages can't use."""
    from importlib.util import find_spec

    # as libucx/load.py reads it
    prefers_system = environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    if prefers_system or not glob.glob(devices) or (package := find_spec("libucx")) is None:
        return False
    folders = package.submodule_search_locations or ()
    return not any(glob.glob(f"{folder}/lib/ucx/libuct_ib*") for folder in folders)


def opened_by(environ: Mapping[str, str], worker_options: Mapping[str, Any] | None = None) -> str:
    """The user's setting by which UCX opens a TCP port; empty: it opens none.

    The order is that of ``_prepare_ucx_config`` of distributed-ucxx. With one of its switches it uses TCP as well.
    `worker_options` are CUDAWorker's, if they are not in Dask's configuration yet.

    >>> opened_by({"UCX_TLS": "tcp,cuda_ipc"}), opened_by({"UCX_TLS": "rc,cuda"}), opened_by({"UCX_TLS": "^sysv"})
    ('UCX_TLS', '', 'UCX_TLS')
    """
    options = worker_options or {}
    env = options.get("env")
    own = env if isinstance(env, Mapping) else {}  # the worker's class refuses anything else
    if "UCX_TLS" in (variables := {**environ, **own}):
        setting = "worker_options['env']['UCX_TLS']" if "UCX_TLS" in own else "UCX_TLS"
        return setting if _includes_tcp(str(variables["UCX_TLS"])) else ""
    given = {switch: options.get(switch) for switch in SWITCHES}
    # dask_cuda.utils.get_ucx_config: a switch that is off enables those that are not set, unless another is on
    if any(given.values()) or (False in given.values() and None in given.values()):
        return f"worker_options[{next(name for name, value in given.items() if value is not None)!r}]"
    for switch in ("tcp", "nvlink", "infiniband"):
        if _configured(switch)[1]:
            return ".".join((_configured(switch)[0], switch))
    section, environment = configured_environment()
    if "TLS" in environment and _includes_tcp(environment["TLS"]):
        return f"{section}.environment.tls"
    return ""


def configured_environment() -> tuple[str, dict[str, str]]:
    """The section of Dask's configuration with UCX's settings, and these by their names without ``UCX_``."""
    section, environment = _configured("environment")
    if not isinstance(environment, Mapping):
        return section, {}
    return section, {name.upper().replace("-", "_"): str(value) for name, value in environment.items()}


def _configured(key: str) -> tuple[str, Any]:
    """The section and value of a key as distributed-ucxx reads it: the older section counts only if the newer has none."""
    import dask

    found = [(section, dask.config.get(f"{section}.{key}", None)) for section in SECTIONS]
    return next((each for each in found if each[1] is not None), found[0])


def _includes_tcp(transports: str) -> bool:
    """Whether a value of ``UCX_TLS`` leaves UCX its TCP transport."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^"):
        return "tcp" not in names
    return any("tcp" in name or "*" in name or name in ("all", "") for name in names)


def connection_config(worker_options: Mapping[str, Any]) -> dict[str, Any]:
    """The Dask configuration by which processes without a GPU connect in the same way as the workers.

    Clients fetch data from the workers, since the scheduler would have to hold it on a GPU. Raises an InputError if Dask's
    configuration of UCX's environment is not a mapping.
    """
    config: dict[str, Any] = {"distributed.client.direct-to-workers": True}
    # dask_cuda.utils.get_ucx_config: a switch that is off enables the others
    if any(worker_options.get(switch) is not None for switch in SWITCHES):
        priority = "rdmacm" if worker_options.get("enable_rdmacm") else "tcp"
        config["distributed-ucxx.environment.sockaddr-tls-priority"] = priority
    return configured_numbers() | config


def transfer_config() -> dict[str, Any]:
    """The Dask configuration of workers that fetch over UCX; empty if the user has set it.

    Each request costs some milliseconds, in which NVLink carries a gigabyte. With distributed's default, 50 MB, a worker
    requests one chunk of an array at a time. This takes 4 to 23 % less time for arrays that workers exchange
    (benchmarks/results/README.md).
    """
    return {} if is_configured(MESSAGE) else {MESSAGE: MESSAGE_BYTES}


def configured_numbers() -> dict[str, Any]:
    """The user's numbers and booleans for UCX's environment as texts: distributed-ucxx fails with others."""
    section, configured = _configured("environment")
    if not isinstance(configured or {}, Mapping):
        raise InputError(
            f"configuration: {section}.environment is {str(configured)[:40]!r}",
            expected="names and values, such as rndv-thresh: 8192",
        )
    return {
        f"{section}.environment.{key}": ("n", "y")[value] if isinstance(value, bool) else str(value)
        for key, value in (configured or {}).items()
        if isinstance(value, (bool, int, float))
    }


def without_gpu_transports(transports: str) -> str:
    """A value of ``UCX_TLS`` without the CUDA transports, for which distributed-ucxx would create a CUDA context.

    ``"all"`` and lists that exclude (``"^cuda"``) keep their meaning.
    """
    if transports.startswith("^"):
        # distributed-ucxx assumes that a list excludes CUDA only if it begins with it
        return "^" + ",".join(sorted(transports[1:].split(","), key=lambda name: GPU_TRANSPORT not in name))
    return ",".join(each for each in transports.split(",") if GPU_TRANSPORT not in each) or "tcp"


#: The user's ``UCX_TLS``, for the workers; None: not set.
_transports: str | None = None
#: The user's section of UCX in Dask's configuration, for the workers; None: nothing is hidden here.
_section: dict[str, Any] | None = None


def disable_gpu_transports(environ: dict[str, str] | os._Environ[str]) -> None:
    """Let this process, which moves no GPU data, start UCX without a context on a GPU, which saves seconds with many GPUs.

    This overrides, in the environment and Dask's configuration of this process, the settings for which
    ``distributed_ucxx.ucxx.init_once`` creates a context. `shown_transports` and `users_config` have those of the user.
    """
    import dask

    global _transports, _section
    if "UCX_TLS" in environ:
        _transports = environ["UCX_TLS"]
        environ["UCX_TLS"] = without_gpu_transports(_transports)
    _section = copy.deepcopy(dask.config.get(SECTION, None) or {})
    # False and not None, for which distributed-ucxx reads the former section
    dask.config.set({f"{SECTION}.{key}": False for key in CONTEXT_OPTIONS})
    _, configured = _configured("environment")
    if any(name.upper() == "TLS" for name in configured or {}):
        hidden = {
            key: without_gpu_transports(str(value)) if key.upper() == "TLS" else value
            for key, value in configured.items()
        }
        dask.config.set({f"{SECTION}.environment": hidden})


def shown_transports() -> dict[str, str]:
    """The variables that `disable_gpu_transports` has changed, for a worker with a GPU."""
    return {} if _transports is None else {"UCX_TLS": _transports}


def hidden_transports() -> dict[str, str]:
    """The same for a worker without a GPU, whose fork server is older than the call of `disable_gpu_transports`."""
    return {} if _transports is None else {"UCX_TLS": without_gpu_transports(_transports)}


@contextmanager
def users_config() -> Iterator[None]:
    """Apply the user's Dask configuration of UCX, which CUDAWorker copies and changes, while a worker with a GPU is made."""
    import dask

    key = dask.config.canonical_name(SECTION, dask.config.config)
    before = copy.deepcopy(dask.config.config.get(key))
    if _section is not None:
        dask.config.config[key] = copy.deepcopy(_section)
    try:
        yield
    finally:
        if before is None:
            dask.config.config.pop(key, None)
        else:
            dask.config.config[key] = before


def load_library(settings: Mapping[str, str] = AT_LOAD) -> bool:
    """Load UCX's library as the first lines of `ucxx` do, without the imports of ucxx; False if it is not of a wheel.

    UCX hooks each function of libc that maps memory and, when it starts, of CUDA. For each it sleeps 50 ms, in case another
    thread is in that function: 0.4 s here, 0.75 s in `install_hooks`.
    """
    # ucxx sets a variable that is unknown to its UCX, which warns of it in every process
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        with variables(settings), away_from_here():
            importlib.import_module("libucxx").load_library()
    except (ImportError, AttributeError, OSError):
        return False
    return True


def variables(wanted: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Set variables of the environment, except those that the user has set, while a library is loaded."""
    return environment({name: value for name, value in wanted.items() if name not in os.environ})


def install_hooks() -> None:
    """Install the hooks of a loaded UCX in CUDA's library now, for all processes that are forked from this one.

    It creates no CUDA context, and does not initialise the driver. If it fails, UCX installs them when it starts.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libucm.so.0", os.RTLD_NOLOAD)
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None)
        library.ucm_set_event_handler(_DEVICE_MEMORY_EVENTS, 1000, handler, None)
        # The hooks stay without the handler.
        library.ucm_unset_event_handler(_DEVICE_MEMORY_EVENTS, handler, None)


def import_ucx() -> None:
    """Import `ucxx`, which takes half a second, for the processes that are forked from this one.

    It sets variables that are missing, such as ``UCX_RNDV_THRESH``, and the environment has priority over Dask's configuration,
    which distributed-ucxx normally reads first. So those that the user has configured are unset again.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # as in `load_library`
    before = set(os.environ)
    with variables(AT_LOAD):
        importlib.import_module("ucxx")
    for name in configured_environment()[1]:
        if f"UCX_{name}" not in before:
            os.environ.pop(f"UCX_{name}", None)


def extend_handshakes() -> None:
    """Extend ucxx's timeout for handshakes, 5 s, which processes of a busy node exceed; distributed-ucxx has no option for it.

    ucxx prints a traceback for each late handshake, and the remains of such a connection may crash the process at a later garbage
    collection.
    """
    backend: Any = importlib.import_module("distributed_ucxx.ucxx")
    begin = backend.init_once

    @functools.wraps(begin)
    def init_once() -> None:
        begin()  # which imports ucxx
        for name in ("create_endpoint", "create_listener"):
            function = getattr(backend.ucxx, name)
            if not isinstance(function, functools.partial):
                setattr(backend.ucxx, name, functools.partial(function, connect_timeout=HANDSHAKE_TIMEOUT))

    backend.init_once = init_once


def start_ucx() -> None:
    """Initialise UCX in this process as distributed does with the first connection."""
    from distributed_ucxx.ucxx import init_once

    init_once()


def in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Call `function` in a thread for which the end of the process does not wait, since UCX may hang.

    The future has the function's exception; asyncio does not complain if nobody awaits it.
    """
    import asyncio  # these two not in ranks, which use other functions of this module only
    from concurrent.futures import Future

    result: Future[None] = Future()
    result.set_running_or_notify_cancel()  # so that the function alone sets the result

    def run() -> None:
        try:
            function()
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    # not in the loop's executor: asyncio.run and the interpreter join its threads, without a deadline
    threading.Thread(target=run, name="start UCX", daemon=True).start()
    future = asyncio.wrap_future(result)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def stop_watching_ucx() -> None:
    """Stop the event loop from watching UCX after the last connection of this process; the next connection starts it again.

    After its last connection distributed-ucxx (0.52) makes no progress of UCX any more, but the event loop still watches a
    descriptor that stays readable, which keeps a core busy.
    """
    import asyncio
    import sys

    loop = asyncio.get_running_loop()
    # There is no public way. Other versions, and modes without a descriptor (UCXPY_PROGRESS_MODE), are ignored.
    with contextlib.suppress(KeyError, AttributeError, ValueError):
        context: Any = sys.modules["ucxx.core"]._ctx
        if loop not in sys.modules["ucxx._lib_async.application_context"].ProgressTasks:
            loop.remove_reader(context.worker.epoll_file_descriptor)
