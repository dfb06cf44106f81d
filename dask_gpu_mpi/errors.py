"""The exceptions of dask_gpu_mpi: one hierarchy, each with the exit code that it stands for.

Exit codes: 2 for input that can't be used (options, placement, launcher, missing library), 1 for a cluster that
could not start or was lost. Every message says what was found, what was needed, and how to mend it.
"""

from __future__ import annotations

__all__ = [
    "ClusterLostError",
    "DaskGpuMpiError",
    "GangCancelledError",
    "InputError",
    "LauncherError",
    "MpiMissingError",
    "OptionError",
    "PlacementError",
    "SpmdError",
    "SpmdTimeoutError",
    "StartupError",
    "WorldTooSmallException",
    "world_too_small",
]


class DaskGpuMpiError(Exception):
    """Base of every error that this package raises.

    Attributes
    ----------
    exit_code : int
        What the process exits with when nobody catches the error.
    reported : bool
        True once the message has been printed on rank 0: nobody prints it again.
    fatal : bool
        True where some ranks can't be reached: MPI can't be left in an orderly way, the job has to be aborted.
    of_script : bool
        True where the cause is in the script: uncaught, it is shown with its traceback, as any error of the script's.
    """

    exit_code: int = 1
    fatal: bool = False
    of_script: bool = False

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class InputError(DaskGpuMpiError, ValueError):
    """The input can't be used: nothing was started."""

    exit_code = 2


class OptionError(InputError):
    """An option is unknown, of the wrong type, or contradicts another."""


class PlacementError(InputError):
    """The ranks' views of the GPUs fit no plan."""


class LauncherError(InputError):
    """The launcher and the MPI library do not match."""


class MpiMissingError(InputError, ImportError):
    """mpi4py finds no MPI library."""


class WorldTooSmallException(InputError, RuntimeError):
    """Fewer MPI ranks than the layout needs.

    What is raised is also an instance of ``dask_mpi.WorldTooSmallException``, so that code written for dask-mpi
    catches it; see `world_too_small`.
    """


class StartupError(DaskGpuMpiError):
    """A rank, the scheduler or a worker did not come up before the start-up deadline."""


class ClusterLostError(DaskGpuMpiError):
    """The scheduler or the last worker was lost while the script ran."""


class SpmdError(DaskGpuMpiError):
    """A gang (`spmd`) has failed; the other members were cancelled. What the member raised is the ``__cause__``.

    Attributes
    ----------
    rank : int or None
        The member that failed first; None: it is the gang as a whole.
    worker : str or None
        Name of its worker.
    host : str or None
        Host name of its node, or its address.
    died : tuple of int
        The ranks whose workers have died, first or after the failure. Where there are any they are the cause, as a rule: NCCL and
        Gloo fail in the other members, at times before the cluster misses the worker.
    """

    of_script = True

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        worker: str | None = None,
        host: str | None = None,
        died: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker
        self.host = host
        self.died = died


class SpmdTimeoutError(SpmdError, TimeoutError):
    """A gang did not start, or not end, in time."""


class GangCancelledError(DaskGpuMpiError):
    """Raised in a member of a gang that waits for others, when the gang is over: another member has failed, for example."""

    of_script = True


def world_too_small(message: str) -> WorldTooSmallException:
    """Make the exception that both ``except`` clauses catch, ours and dask-mpi's.

    dask-mpi imports Dask, which takes a second, so it is only imported here, where the error is raised.
    """
    from dask_mpi.exceptions import WorldTooSmallException as DaskMpiException

    class Both(WorldTooSmallException, DaskMpiException):  # type: ignore[misc]
        pass

    Both.__name__ = Both.__qualname__ = "WorldTooSmallException"
    return Both(message)
