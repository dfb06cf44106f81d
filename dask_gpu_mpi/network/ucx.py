"""UCX: what the processes of a cluster need so that they find each other, and only the workers touch a GPU.

UCX chooses among its transports by itself, and two processes use those that both have. What they must agree on is how a
connection is made (``SOCKADDR_TLS_PRIORITY``): dask-cuda sets it for its workers when one of its switches is given
(``enable_nvlink`` and so on), so it is set alike for the scheduler, the agents and the client. See ``distributed_ucxx.ucxx``,
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

from dask_gpu_mpi.base.streams import away_from_here, leave_directory
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.options.dask_config import is_configured
from dask_gpu_mpi.options.rules import SWITCHES

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "AT_LOAD",
    "AT_LOAD_BETWEEN_NODES",
    "CLOSED",
    "UcxAbility",
    "configured_environment",
    "configured_numbers",
    "connection_config",
    "disable_gpu_transports",
    "extend_handshakes",
    "hidden_transports",
    "import_ucx",
    "import_ucx_in_thread",
    "in_thread",
    "install_hooks",
    "lacks_rdma",
    "load_library",
    "missing_ucx",
    "obstacle_between_nodes",
    "opened_by",
    "shown_transports",
    "start_ucx",
    "start_ucx_in_thread",
    "stop_watching_ucx",
    "transfer_config",
    "users_config",
    "variables",
    "without_gpu_transports",
]

#: The value of ``UCX_TLS`` unless the user has chosen one. Everyone with the job's group may write System V shared memory. TCP
#: has a port that authenticates nobody: its peers read and write any address of the process.
CLOSED = "^sysv,tcp"
#: The package that brings UCX to Dask, and the first libucx with which no release of UCXX works.
PACKAGE, LIBUCX, LIBUCX_LIMIT = "distributed_ucxx", ("libucx-cu12", "libucx-cu13"), (1, 22)
SECTION = "distributed-ucxx"
#: Where Dask's configuration may configure UCX: that, and distributed's name from before.
SECTIONS = (SECTION, "distributed.comm.ucx")


def missing_ucx(*, device_memory: bool) -> Problem | None:
    """Why the workers of this environment can't use UCX; None: they can. Imports nothing of it.

    `device_memory`: whether it is for memory of GPUs, which RMM allocates.
    """
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
    """How far the workers of a rank can use UCX beside TLS."""

    #: Why they can't; None: they can, or need not.
    obstacle: Problem | None = None
    #: Why it does not lead to other nodes; empty: it does.
    between_nodes: str = ""
    #: The user's setting by which it opens a TCP port; empty: it opens none.
    opened_by: str = ""


#: Devices for RDMA, as the kernel lists them.
RDMA = "/sys/class/infiniband/*"


def obstacle_between_nodes(environ: Mapping[str, str], devices: str = RDMA) -> str:
    """Why UCX has no way to other nodes that is not TCP; empty: it has RDMA.

    Parameters
    ----------
    environ : mapping
        The process's.
    devices : str
        Pattern of the files that stand for RDMA devices.
    """
    if not glob.glob(devices):
        return "no RDMA device"
    if not lacks_rdma(environ, devices):
        return ""
    return "the libucx package has no InfiniBand (for a UCX of the system: RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true)"


def lacks_rdma(environ: Mapping[str, str], devices: str = RDMA) -> bool:
    """Whether this node has RDMA devices that the UCX of the environment's packages can't use. Parameters as above."""
    from importlib.util import find_spec

    # as libucx/load.py reads it
    prefers_system = environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    if prefers_system or not glob.glob(devices) or (package := find_spec("libucx")) is None:
        return False
    folders = package.submodule_search_locations or ()
    return not any(glob.glob(f"{folder}/lib/ucx/libuct_ib*") for folder in folders)


def opened_by(environ: Mapping[str, str], worker_options: Mapping[str, Any] | None = None) -> str:
    """The user's setting by which UCX opens a TCP port; empty: it opens none.

    Parameters
    ----------
    environ : mapping
        The process's.
    worker_options : mapping, optional
        CUDAWorker's, where they are not in Dask's configuration yet.

    Notes
    -----
    In the order in which ``_prepare_ucx_config`` of distributed-ucxx reads them. With one of its switches it uses TCP as well.

    Examples
    --------
    >>> opened_by({"UCX_TLS": "tcp,cuda_ipc"}), opened_by({"UCX_TLS": "rc,cuda"}), opened_by({"UCX_TLS": "^sysv"})
    ('UCX_TLS', '', 'UCX_TLS')
    """
    options = worker_options or {}
    own = options.get("env") or {}
    if "UCX_TLS" in (variables := {**environ, **own}):
        setting = "worker_options['env']['UCX_TLS']" if "UCX_TLS" in own else "UCX_TLS"
        return setting if _includes_tcp(str(variables["UCX_TLS"])) else ""
    given = {switch: options.get(switch) for switch in SWITCHES}
    # dask_cuda.utils.get_ucx_config: one that is off switches on those that are not set, unless another is on
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
    """UCX's settings in Dask's configuration, by their names without ``UCX_``, and the section that they are from."""
    section, environment = _configured("environment")
    if not isinstance(environment, Mapping):
        return section, {}
    return section, {name.upper().replace("-", "_"): str(value) for name, value in environment.items()}


def _configured(key: str) -> tuple[str, Any]:
    """A value of Dask's configuration as distributed-ucxx reads it: the older section counts only if the newer has none."""
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
    """The Dask configuration by which processes without a GPU connect as the workers do.

    Parameters
    ----------
    worker_options : mapping
        CUDAWorker's.

    Returns
    -------
    dict
        Also that clients fetch data from the workers and not by way of the scheduler, which would have to hold it on a GPU.

    Raises
    ------
    InputError
        Dask's configuration of UCX's environment is no mapping.
    """
    config: dict[str, Any] = {"distributed.client.direct-to-workers": True}
    # dask_cuda.utils.get_ucx_config: one that is switched off switches the others on
    if any(worker_options.get(switch) is not None for switch in SWITCHES):
        priority = "rdmacm" if worker_options.get("enable_rdmacm") else "tcp"
        config["distributed-ucxx.environment.sockaddr-tls-priority"] = priority
    return configured_numbers() | config


#: Bytes that a worker asks of another at a time, and what distributed has for it: 40 ms of a fast Ethernet, 0.1 ms of NVLink.
MESSAGE, MESSAGE_BYTES = "distributed.worker.transfer.message-bytes-limit", "2 GB"


def transfer_config() -> dict[str, Any]:
    """The Dask configuration of workers that fetch over UCX; empty where the user has set it.

    Each request costs some milliseconds, in which NVLink carries a gigabyte. With distributed's default, 50 MB, a worker asks for
    one chunk of an array at a time; with this it takes 4 to 23 % less time for arrays that cross (benchmarks/results/README.md).
    """
    return {} if is_configured(MESSAGE) else {MESSAGE: MESSAGE_BYTES}


def configured_numbers() -> dict[str, Any]:
    """What the user configured for UCX's environment as numbers or booleans, as texts: distributed-ucxx fails with others."""
    import dask

    texts: dict[str, Any] = {}
    for section in SECTIONS:
        configured = dask.config.get(f"{section}.environment", None) or {}
        if not isinstance(configured, Mapping):
            raise InputError(
                f"configuration: {section}.environment is {str(configured)[:40]!r}",
                expected="names and values, such as rndv-thresh: 8192",
            )
        for key, value in configured.items():
            if isinstance(value, (bool, int, float)):
                texts[f"{section}.environment.{key}"] = (
                    ("n", "y")[value] if isinstance(value, bool) else str(value)
                )
    return texts


#: What the vendor of the GPUs is called in UCX's names of transports, and the options of distributed-ucxx that make a context.
GPU_TRANSPORT = "cuda"
CONTEXT_OPTIONS = ("create-cuda-context", "nvlink", "cuda-copy")


def without_gpu_transports(transports: str) -> str:
    """A value of ``UCX_TLS`` without the CUDA transports, for which distributed-ucxx would make a CUDA context.

    ``"all"`` and lists that exclude (``"^cuda"``) keep their meaning.
    """
    if transports.startswith("^"):
        # distributed-ucxx takes a list for one that excludes CUDA where it begins so
        return "^" + ",".join(sorted(transports[1:].split(","), key=lambda name: GPU_TRANSPORT not in name))
    return ",".join(each for each in transports.split(",") if GPU_TRANSPORT not in each) or "tcp"


#: ``UCX_TLS`` as the user had it, for the workers; None: not set.
_transports: str | None = None
#: Dask's section of UCX as the user had it, for the workers; None: nothing is hidden here.
_section: dict[str, Any] | None = None


def disable_gpu_transports(environ: dict[str, str] | os._Environ[str]) -> None:
    """Let this process, which moves no GPU data, start UCX without looking at GPUs: no context, and seconds less on many GPUs.

    Parameters
    ----------
    environ : mapping
        The process's.

    Notes
    -----
    What asks for a context is taken from ``distributed_ucxx.ucxx.init_once``. It is overridden in the environment and in the Dask
    configuration of this process; `shown_transports` and `users_config` have what the user set.
    """
    import dask

    global _transports, _section
    if "UCX_TLS" in environ:
        _transports = environ["UCX_TLS"]
        environ["UCX_TLS"] = without_gpu_transports(_transports)
    _section = copy.deepcopy(dask.config.get(SECTION, None) or {})
    # False and not None, for which distributed-ucxx looks at the names that distributed itself had before
    dask.config.set({f"{SECTION}.{key}": False for key in CONTEXT_OPTIONS})
    configured = dask.config.get(f"{SECTION}.environment", None) or dask.config.get(
        "distributed.comm.ucx.environment", None
    )
    if any(name.upper() == "TLS" for name in configured or {}):
        shown = {
            key: without_gpu_transports(str(configured[key])) if key.upper() == "TLS" else configured[key]
            for key in configured
        }
        dask.config.set({f"{SECTION}.environment": shown})


def shown_transports() -> dict[str, str]:
    """What `disable_gpu_transports` has changed, as a worker's environment is to have it."""
    return {} if _transports is None else {"UCX_TLS": _transports}


def hidden_transports() -> dict[str, str]:
    """The same for a worker without a GPU: its process comes from the fork server, older than `disable_gpu_transports`."""
    return {} if _transports is None else {"UCX_TLS": without_gpu_transports(_transports)}


@contextmanager
def users_config() -> Iterator[None]:
    """Have the user's Dask configuration of UCX while a worker with a GPU is made, which takes it over, and ours afterwards.

    CUDAWorker changes it as well, as it is for its workers.
    """
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


#: What UCX reads when its library is loaded. Up to 1.19 it answers an error with forty lines in the job's output and handles
#: Python's signals. Its errors go to standard output, where the script's results are.
AT_LOAD = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"}
#: The same for MPI between nodes, whose port is open to all: UCX would print a warning for each connection of a stranger.
AT_LOAD_BETWEEN_NODES = {**AT_LOAD, "UCX_LOG_LEVEL": "error"}


def load_library(settings: Mapping[str, str] = AT_LOAD) -> bool:
    """Load UCX's library as the first lines of `ucxx` do, without what ucxx imports; False where it is no package of wheels.

    UCX puts a hook into each function of libc that maps memory and, when it starts, of CUDA. At each it waits for 50 ms, in case
    another thread is in that function: 0.4 s here, 0.75 s in `install_hooks`, all of it asleep.
    """
    # ucxx sets a variable that its UCX does not know, which warns of it in every process
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        with variables(settings), away_from_here():
            importlib.import_module("libucxx").load_library()
    except (ImportError, AttributeError, OSError):
        return False
    return True


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Load or start a library in here with these variables of the environment, but for those that the user has set."""
    settings = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)


#: UCM_EVENT_MEM_TYPE_ALLOC and UCM_EVENT_MEM_TYPE_FREE of ucm/api/ucm.h.
_DEVICE_MEMORY_EVENTS = 1 << 20 | 1 << 21


def install_hooks() -> None:
    """Have UCX, once it is loaded, put its hooks into CUDA's library now: what is forked from here starts with them.

    Makes no CUDA context, and does not initialise the driver. Where it can't be done, UCX does it when it starts.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libucm.so.0", os.RTLD_NOLOAD)
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None)
        library.ucm_set_event_handler(_DEVICE_MEMORY_EVENTS, 1000, handler, None)
        # The hooks stay without it.
        library.ucm_unset_event_handler(_DEVICE_MEMORY_EVENTS, handler, None)


def import_ucx_in_thread() -> None:
    """`import_ucx` in a thread that does nothing else, while tasks use this process's working directory.

    Raises
    ------
    InputError
        The thread can't leave the working directory, and a file there would configure UCX.
    """
    if not leave_directory() and os.path.lexists("ucx.conf"):
        raise InputError(
            "the file ucx.conf in the working directory may be anyone's",
            fix="remove it, or use UCX_CONFIG_DIR",
        )
    import_ucx()


def import_ucx() -> None:
    """Import `ucxx` for the processes that are forked from this one: half a second.

    It sets variables where the environment has none (``UCX_RNDV_THRESH``, say), and what the environment has wins over Dask's
    configuration. distributed-ucxx reads the configuration before it imports; so those that the user configured are unset again.
    """
    import dask

    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # as in `load_library`
    before = set(os.environ)
    with variables(AT_LOAD):
        importlib.import_module("ucxx")
    for section in SECTIONS:
        for key in dask.config.get(f"{section}.environment", None) or {}:
            name = "UCX_" + key.replace("-", "_").upper()
            if name not in before:
                os.environ.pop(name, None)


#: Seconds for the handshake of a connection over UCX; Dask's own deadline for connecting is shorter, and Dask tries again.
HANDSHAKE_TIMEOUT = 60.0


def extend_handshakes() -> None:
    """Give the handshakes of Dask's connections over UCX more time than ucxx's 5 s, which processes of a busy node miss.

    distributed-ucxx has no option for it. ucxx writes a traceback for each handshake that is late, and what is left of such a
    connection may crash the process at a later garbage collection.
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
    """Initialise UCX in this process as distributed would with the first connection."""
    from distributed_ucxx.ucxx import init_once

    init_once()


def start_ucx_in_thread() -> asyncio.Future[None]:
    """`start_ucx` in a thread."""
    return in_thread(start_ucx)


def in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Call `function` in a thread of its own, which the end of the process does not wait for, should UCX hang.

    Returns
    -------
    asyncio.Future
        Of the running event loop; done when the function is. What it raised is raised where it is awaited, and nowhere else.
    """
    import asyncio  # ranks, which only ask for `connection_config`, do without it

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(error: Exception | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            function()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error)

    # Not the loop's executor: asyncio.run and the interpreter join its threads, without a deadline.
    threading.Thread(target=run, name="start UCX", daemon=True).start()
    return future


def stop_watching_ucx() -> None:
    """Have a process whose connections over UCX are all closed do without UCX until the next one; of the running event loop.

    With its last connection distributed-ucxx (0.52) stops asking UCX for news, but leaves the event loop watching a descriptor
    that stays readable: a core kept busy. The next connection has it watched again.
    """
    import asyncio
    import sys

    loop = asyncio.get_running_loop()
    # No public way leads to them. Other versions, and modes without a descriptor (UCXPY_PROGRESS_MODE), stay as they are.
    with contextlib.suppress(KeyError, AttributeError, ValueError):
        context: Any = sys.modules["ucxx.core"]._ctx
        if loop not in sys.modules["ucxx._lib_async.application_context"].ProgressTasks:
            loop.remove_reader(context.worker.epoll_file_descriptor)
