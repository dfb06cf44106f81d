"""UCX between the workers of a cluster: whether it can be used, its configuration, and its import.

`startup.transport` asks for each rank what UCX can do there. `ucx_endpoint` imports it in a worker's process.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import environment
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.options.model import SWITCHES

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")
#: The package that brings UCX to Dask, and the first libucx with which no release of UCXX works.
PACKAGE, LIBUCX, LIBUCX_LIMIT = "distributed_ucxx", ("libucx-cu12", "libucx-cu13"), (1, 22)
#: The default of ``UCX_TLS``. Everyone in the job's group may write System V shared memory. TCP has a port without
#: authentication: its peers read and write any address of the process.
CLOSED = "^sysv,tcp"
#: The sections of UCX in Dask's configuration; the second is distributed's former name.
SECTIONS = ("distributed-ucxx", "distributed.comm.ucx")


@dataclass(frozen=True)
class UcxAbility:
    """Whether the workers of a rank can use UCX together with TLS."""

    #: The reason why they can't; None: they can, or need not.
    obstacle: Problem | None = None
    #: The reason why it does not lead to other nodes; empty: it does.
    between_nodes: str = ""
    #: The user's setting by which it opens a TCP port; empty: it opens none.
    opened_by: str = ""
    #: The UCX of the system that workers are to load, since their own has no RDMA; empty: their own.
    system: str = ""


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


#: Devices for RDMA, as the kernel lists them.
RDMA = "/sys/class/infiniband/*"
#: Devices of Slingshot 11, which UCX does not drive.
SLINGSHOT = "/sys/class/cxi/*"
#: The variable by which libucx takes the UCX of the system in place of its own.
PREFERS_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
#: Prints the version and the folder of the UCX of the system, which is loaded as libucx/load.py does it.
ASKS_SYSTEM = """
import ctypes, os
library = ctypes.CDLL("libucp.so")
numbers = [ctypes.c_uint() for _ in range(3)]
library.ucp_get_version(*map(ctypes.byref, numbers))
path = next(line.split()[-1] for line in open("/proc/self/maps") if "/libucp.so" in line)
print(".".join(str(number.value) for number in numbers), os.path.dirname(path))
"""
#: Seconds for that: its file system may be dead.
ASKING = 10.0


def way_between_nodes(
    environ: Mapping[str, str], *, device_memory: bool, devices: str = RDMA
) -> tuple[str, str]:
    """The reason why UCX leads to other nodes by TCP only, or nothing, and the system's UCX that workers need for RDMA, if any.

    RDMA needs a device, and a UCX with InfiniBand: that of the libucx package or, if it has none, the system's.
    """
    from importlib.util import find_spec

    if not glob.glob(devices):
        return "UCX has no transport for Slingshot" if glob.glob(SLINGSHOT) else "no RDMA device", ""
    if (package := find_spec("libucx")) is None:  # conda's, or one that UCXX was built with
        return "", ""
    folders = package.submodule_search_locations or ()
    if any(glob.glob(f"{folder}/lib/ucx/libuct_ib*") for folder in folders):
        return "", ""
    lacks = "the libucx package has no InfiniBand"
    if PREFERS_SYSTEM in environ:
        # as libucx/load.py reads it
        return f"{lacks} ({PREFERS_SYSTEM})" if environ[PREFERS_SYSTEM].lower() == "false" else "", ""
    why, system = _system_ucx(environ, device_memory=device_memory)
    return f"{lacks}, and {why}. Fix: load your site's module of UCX" if why else "", system


def _system_ucx(environ: Mapping[str, str], *, device_memory: bool) -> tuple[str, str]:
    """The reason against the UCX that the system's loader finds, or nothing and its name, if workers can use it for RDMA."""
    import sys
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    from dask_gpu_mpi.sites.batch import run_command

    # in a process of its own: what is loaded stays
    done = run_command(
        [sys.executable, "-I", "-S", "-c", ASKS_SYSTEM],
        {**environ, **AT_LOAD},
        ASKING,
        prepare=partial(die_with_parent, os.getpid()),
    )
    version, _, folder = done.stdout.strip().partition(" ")
    if done.returncode or not folder:
        return "the system has no UCX (libucp.so)", ""
    name = f"UCX {version} in {folder}"
    for kind in ("ib", "cuda") if device_memory else ("ib",):
        if not glob.glob(f"{folder}/ucx/libuct_{kind}.*"):
            return f"the {name} has no {kind}", ""
    for package in LIBUCX:
        with contextlib.suppress(PackageNotFoundError):
            for each in map(Requirement, requires(package.replace("libucx", "libucxx")) or ()):
                if each.name == package and not each.specifier.contains(version):
                    return f"the {name} does not suit UCXX (expected {each.specifier})", ""
    return "", name


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


def _includes_tcp(transports: str) -> bool:
    """Whether a value of ``UCX_TLS`` leaves UCX its TCP transport."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^"):
        return "tcp" not in names
    return any("tcp" in name or "*" in name or name in ("all", "") for name in names)


# The user's settings of UCX in Dask's configuration, and ours of Dask.

#: Bytes that a worker requests of another at a time, and our default: 40 ms of a fast Ethernet, 20 ms of NVLink.
MESSAGE, MESSAGE_BYTES = "distributed.worker.transfer.message-bytes-limit", "2 GB"


def configured_environment() -> tuple[str, dict[str, str]]:
    """The section of Dask's configuration with UCX's settings, and these by their names without ``UCX_``."""
    section, environment = _configured("environment")
    if not isinstance(environment, Mapping):
        return section, {}
    return section, {name.upper().replace("-", "_"): str(value) for name, value in environment.items()}


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


def _configured(key: str) -> tuple[str, Any]:
    """The section and value of a key as distributed-ucxx reads it: the older section counts only if the newer has none."""
    import dask

    found = [(section, dask.config.get(f"{section}.{key}", None)) for section in SECTIONS]
    return next((each for each in found if each[1] is not None), found[0])


def transfer_config() -> dict[str, Any]:
    """The Dask configuration of workers that fetch over UCX, or have a GPU; empty if the user has set it.

    Each request costs some milliseconds, with frames of cuDF 25, in which NVLink carries a gigabyte and streams 100 MB. With
    distributed's default, 50 MB, a worker requests one chunk of an array at a time, and one request after the other of a peer.
    This takes 4 to 23 % less time for arrays that workers exchange (benchmarks/results/README.md).
    """
    from dask_gpu_mpi.options.convert import is_configured  # not in MPI's child

    return {} if is_configured(MESSAGE) else {MESSAGE: MESSAGE_BYTES}


# The library.

#: Variables that UCX reads when its library is loaded. Up to 1.19 it prints forty lines for an error and handles Python's
#: signals. It prints errors to standard output, where the script's results are.
AT_LOAD = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"}
#: The same for MPI between nodes, whose port is open to all: UCX would print a warning for each connection of a stranger.
AT_LOAD_BETWEEN_NODES = {**AT_LOAD, "UCX_LOG_LEVEL": "error"}


def import_ucx() -> None:
    """Import `ucxx`, which takes half a second.

    It sets variables that are missing, such as ``UCX_RNDV_THRESH``, and the environment has priority over Dask's configuration,
    which distributed-ucxx normally reads first. So those that the user has configured are unset again.
    """
    # ucxx sets a variable that is unknown to its UCX, which warns of it in every process
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    before = set(os.environ)
    with variables(AT_LOAD):
        importlib.import_module("ucxx")
    for name in configured_environment()[1]:
        if f"UCX_{name}" not in before:
            os.environ.pop(f"UCX_{name}", None)


def variables(wanted: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Set variables of the environment, except those that the user has set, while a library is loaded."""
    return environment({name: value for name, value in wanted.items() if name not in os.environ})


def in_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Call `function` in a thread for which the end of the process does not wait, since it may hang.

    The future has its result, or its exception; asyncio does not complain if nobody awaits it.
    """
    import asyncio  # these two not in ranks, which use other functions of this module only
    from concurrent.futures import Future

    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()  # so that the function alone sets the result

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    # not in the loop's executor: asyncio.run and the interpreter join its threads, without a deadline
    threading.Thread(target=run, name="may hang", daemon=True).start()
    future = asyncio.wrap_future(result)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
