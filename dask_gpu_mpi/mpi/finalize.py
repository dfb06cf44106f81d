"""MPI is finalized when Python ends, where mpi4py is set not to: after what the script has registered with `atexit`.

That may use MPI, as it may where mpi4py finalizes it, after all of `atexit`. Handlers run in the reverse order of their
registration: so ours is registered when this is imported, and only what came before the package comes after it.
"""

from __future__ import annotations

import atexit
import os

__all__ = ["finalize", "finalize_at_exit"]

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

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


atexit.register(finalize)
