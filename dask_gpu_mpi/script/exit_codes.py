"""What a rank of a cluster exits with, whichever way it ends; users read `docs/exit-codes.md`.

A rank with the script exits with the script's code. Errors of dask_gpu_mpi carry theirs (`dask_gpu_mpi.errors`).
"""

from __future__ import annotations

import signal

from dask_gpu_mpi.errors import DaskGpuMpiError

__all__ = ["FAILED", "WALLTIME", "of_abort", "of_exception", "of_rank", "of_signal"]

#: The cluster or the launcher was lost, a rank did not answer, or the script raised.
FAILED = 1
#: The job ended because its time was running out and it has written its checkpoint: EX_TEMPFAIL of sysexits.h, "try again
#: later", which is what a requeue tests for.
WALLTIME = 75


def of_signal(number: int) -> int:
    """What a shell reports of a process that a signal ended.

    >>> of_signal(15)
    143
    """
    return 128 + number


def of_exception(error: BaseException) -> int:
    """What Python exits with after an exception that nobody caught.

    >>> of_exception(ValueError()), of_exception(KeyboardInterrupt()), of_exception(SystemExit(75))
    (1, 130, 75)
    """
    if isinstance(error, DaskGpuMpiError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return of_signal(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else FAILED


def of_rank(*, lost: bool, ended: bool, ended_by: int | None, received: int | None) -> int:
    """What a rank without the script exits with.

    Parameters
    ----------
    lost : bool
        It knows that the cluster was lost.
    ended : bool
        It knows that the job ends.
    ended_by : int or None
        The signal that ended the job, on rank 0 of a job without a script.
    received : int or None
        The first signal that this rank was sent: it counts where the rank leaves by itself.

    >>> of_rank(lost=False, ended=True, ended_by=None, received=15)
    0
    >>> of_rank(lost=False, ended=False, ended_by=None, received=15)
    143
    """
    if lost:
        return FAILED
    number = ended_by if ended else received
    if number is not None:
        return of_signal(number)
    return 0 if ended else FAILED


def of_abort(code: int) -> int:
    """What a job is aborted with whose ranks would have exited with `code`: never 0, since some did not answer.

    >>> of_abort(0), of_abort(143)
    (1, 143)
    """
    return code or FAILED
