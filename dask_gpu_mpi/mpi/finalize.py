"""MPI is finalized when Python ends, if mpi4py is set not to: after everything that the script has registered with `atexit`.

The script's handlers may use MPI, as they may if mpi4py finalizes it, after all of `atexit`. Handlers run in the reverse order of
their registration. Ours is registered when this module is imported, so only handlers from before that import run after it.

MPICH 4 and older have defects at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
from collections.abc import Callable

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.launchers import alone_on_host

#: Seconds for the messages of a barrier to arrive, before the connections close.
SETTLING = 0.3
#: The process that has to do it.
_owner = 0
#: Called instead, if MPI is left as it is.
_instead: Callable[[], object] | None = None


def is_mpich_before_5(version: str) -> bool:
    """Whether the library is MPICH itself (not Intel's, Cray's, MVAPICH's) of a version below 5.

    >>> [is_mpich_before_5(f"MPICH Version:      {number}") for number in ("4.0.2", "3.4", "5.0.2", "40.1")]
    [True, True, False, False]
    >>> is_mpich_before_5("MPI VERSION    : CRAY MPICH version 4.1")
    False
    """
    return re.match(r"MPICH Version:\s*[1-4]\.", version) is not None


def finalize_at_exit() -> None:
    """Let this process finalize MPI, but no process that it forks."""
    global _owner
    _owner = os.getpid()


def do_not_finalize(instead: Callable[[], object] = lambda: None) -> None:
    """Do not finalize MPI, which would wait for lost ranks. The first call counts."""
    global _instead
    _instead = _instead or instead


def finalize() -> None:
    """Finalize MPI, if this process has to."""
    if os.getpid() != _owner:
        return
    if _instead is not None:
        _instead()
        return
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    world = MPI.COMM_WORLD
    version = MPI.Get_library_version()
    # With MPICH 4 and older over UCX, MPI_Finalize may never return: a rank closes its connections and then waits for the others
    # in PMI, without answering a rank that is still closing its own (4.0.2, two nodes: one job of five). But if one node has
    # several ranks, Hydra needs the call, or loses the exit code.
    may_hang = world.size > 1 and is_mpich_before_5(version) and "ch4:ucx" in version
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


atexit.register(finalize)
