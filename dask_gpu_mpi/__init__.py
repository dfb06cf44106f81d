"""Dask on every GPU of a batch job: its ranks become one scheduler, one client and a worker on each GPU.

``mpirun -np N python -m dask_gpu_mpi script.py``, or `initialize` in a script. Importing this package loads neither Dask nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.errors import (
    ClusterLostError,
    DaskGpuMpiError,
    GangCancelledError,
    InputError,
    LauncherError,
    MpiMissingError,
    OptionError,
    PlacementError,
    SpmdError,
    SpmdTimeoutError,
    StartupError,
    WorldTooSmallException,
)

if TYPE_CHECKING:
    from dask_gpu_mpi.cli.jobscript import job_script, submit
    from dask_gpu_mpi.gang.group import Group
    from dask_gpu_mpi.gang.spmd import spmd
    from dask_gpu_mpi.job.api import connect, execute, initialize, send_close_signal
    from dask_gpu_mpi.job.session import Session, current_session
    from dask_gpu_mpi.plan import Plan

__all__ = [
    "ClusterLostError",
    "DaskGpuMpiError",
    "GangCancelledError",
    "Group",
    "InputError",
    "LauncherError",
    "MpiMissingError",
    "OptionError",
    "PlacementError",
    "Plan",
    "Session",
    "SpmdError",
    "SpmdTimeoutError",
    "StartupError",
    "WorldTooSmallException",
    "__version__",
    "connect",
    "current_session",
    "execute",
    "initialize",
    "job_script",
    "send_close_signal",
    "spmd",
    "submit",
]

#: The modules of names that are imported at their first use.
_LAZY = {
    "Group": "gang.group",
    "Plan": "plan",
    "Session": "job.session",
    "connect": "job.api",
    "current_session": "job.session",
    "execute": "job.api",
    "initialize": "job.api",
    "job_script": "cli.jobscript",
    "send_close_signal": "job.api",
    "spmd": "gang.spmd",
    "submit": "cli.jobscript",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("dask-gpu-mpi")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
