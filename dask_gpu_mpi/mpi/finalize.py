"""MPI is finalized when Python ends, where mpi4py is set not to: after what the script has registered with `atexit`.

That may use MPI, as it may where mpi4py finalizes it, after all of `atexit`. Handlers run in the reverse order of their
registration: so ours is registered when this is imported, and only what came before the package comes after it.

Not with MPICH 4 and older over UCX, whose ``MPI_Finalize`` may never return: a rank closes its connections and then waits for
the others in PMI, without answering a rank that is still closing its own (4.0.2, two nodes: one job of five). But where one node
has several ranks, Hydra wants it, or loses the exit code.
"""

from __future__ import annotations

import atexit
import os
import time

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.mpi.launcher_check import is_mpich_before_5
from dask_gpu_mpi.sites.launchers import alone_on_host

__all__ = ["finalize", "finalize_at_exit"]

#: Seconds for the messages of a barrier to arrive, before the connections close.
SETTLING = 0.3
#: The process that is to do it.
_owner = 0


def finalize_at_exit() -> None:
    """Have this process, and none that it forks, finalize MPI."""
    global _owner
    _owner = os.getpid()


def finalize() -> None:
    """Finalize MPI, where this process is to."""
    if os.getpid() != _owner:
        return
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    version = MPI.Get_library_version()
    world = MPI.COMM_WORLD
    may_hang = is_mpich_before_5(version) and "ch4:ucx" in version and world.size > 1
    # As Finalize, this keeps each rank from ending before all have come to their end, which is all that we need of it.
    # mpi4py's allreduce would unpickle what arrives.
    all_alone = bytearray([may_hang and _alone()])
    if may_hang:
        world.Allreduce(MPI.IN_PLACE, [all_alone, MPI.C_BOOL], op=MPI.LAND)
    if all_alone[0]:
        time.sleep(SETTLING)
    else:
        MPI.Finalize()


def _alone() -> bool:
    try:
        return alone_on_host(os.environ)
    except LauncherError:
        return False


atexit.register(finalize)
