"""Problems as data (`Problem`), and the exceptions with them: one hierarchy, each class with its exit code.

Exit codes: 2 for input that can't be used (options, placement, launcher, missing library), else 1. A problem has what was
found and, if known, what was expected and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """The problem of an error, a warning, or a line of `check`. It becomes text when it is printed.

    >>> print(Problem("no GPU", expected="4", fix="reset it", where="rank 1 of 2 on h1"))
    rank 1 of 2 on h1: no GPU (expected 4). Fix: reset it
    """

    found: str
    expected: str = ""
    fix: str = ""
    #: Its rank and host, if they are printed before the text.
    where: str = ""
    #: Its line of `check`; empty: any.
    what: str = ""
    #: The ranks and the hosts that it concerns; empty: the job.
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The problem without the fix."""
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.found}{f' (expected {self.expected})' if self.expected else ''}"

    def __str__(self) -> str:
        return f"{self.text}. Fix: {self.fix}" if self.fix else self.text


class DaskGpuMpiError(Exception):
    """Base of this package's errors.

    Attributes
    ----------
    problem : Problem
        The message as data.
    exit_code : int
        The exit code of a process that does not catch the error.
    reported : bool
        True once the message has been printed on rank 0: it is not printed again.
    fatal : bool
        True if some ranks can't be reached, so that the job has to be aborted.
    of_script : bool
        True if the cause is in the script: uncaught, it is printed with its traceback, like any error of the script.
    """

    exit_code: int = 1
    of_script: bool = False

    def __init__(
        self,
        found: str | Problem,
        *,
        expected: str = "",
        fix: str = "",
        where: str = "",
        what: str = "",
        reported: bool = False,
        fatal: bool = False,
    ) -> None:
        self.problem = found if isinstance(found, Problem) else Problem(found, expected, fix, where, what)
        #: Its first parts, if ranks have reported several problems.
        self.problems: tuple[Problem, ...] = (self.problem,)
        super().__init__(str(self.problem))
        self.reported = reported
        self.fatal = fatal


class InputError(DaskGpuMpiError, ValueError):
    """The input can't be used, or the call is not possible here."""

    exit_code = 2


class OptionError(InputError):
    """An option is missing, unknown or wrong, or contradicts another."""


class PlacementError(InputError):
    """No plan is possible with the GPUs and options of the ranks."""


class LauncherError(InputError):
    """The launcher can't be used: for example, it does not match the MPI library."""


class MpiMissingError(InputError, ImportError):
    """mpi4py finds no MPI library."""


class WorldTooSmallException(InputError, RuntimeError):
    """Fewer ranks than the layout needs.

    The raised exception is also an instance of ``dask_mpi.WorldTooSmallException``, so that code for dask-mpi
    catches it.
    """


class StartupError(DaskGpuMpiError):
    """A rank, the scheduler or a worker did not come up, or not before the start-up deadline."""


class ClusterLostError(DaskGpuMpiError):
    """The cluster was lost while the script ran, for example its scheduler or its last worker."""


class SpmdError(DaskGpuMpiError):
    """A gang (`spmd`) has failed; the other members were cancelled. If a member has raised an exception, it is the ``__cause__``.

    Attributes
    ----------
    rank : int or None
        The member that failed first; None: the gang as a whole.
    worker : str or None
        Name of its worker.
    host : str or None
        Host name of its node, or its address.
    died : tuple of int
        The ranks whose workers have died, before or after the failure. If there are any, they are usually the cause: NCCL and
        Gloo fail in the other members, sometimes before the cluster detects the death.
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
    """A gang did not start or end in time."""


class GangCancelledError(DaskGpuMpiError):
    """Raised in a member of a gang that waits for others, when the gang is over: another member has failed, for example."""

    of_script = True


def world_too_small(found: str | Problem, *, fix: str = "") -> WorldTooSmallException:
    """Make the exception that both ``except`` clauses catch, ours and dask-mpi's.

    dask-mpi imports Dask, which takes a second, so it is only imported here, where the error is raised.
    """
    from dask_mpi.exceptions import WorldTooSmallException as DaskMpiException

    class Both(WorldTooSmallException, DaskMpiException):  # type: ignore[misc]
        pass

    Both.__name__ = Both.__qualname__ = "WorldTooSmallException"
    return Both(found, fix=fix)
