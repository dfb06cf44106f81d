"""What client, scheduler and members of a gang tell each other: names of handlers, and answers as plain data."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

__all__ = ["CANCEL", "LEAVE", "MOST_SECONDS", "PLUGIN", "State", "is_number", "no_result", "one_line"]

#: Most seconds of a limit: clocks and timers take three years everywhere.
MOST_SECONDS = 100_000_000
#: The scheduler's plugin.
PLUGIN = "dask_gpu_mpi-gangs"
#: What the scheduler sends a member's worker when the gang is over.
CANCEL = "dask_gpu_mpi_gang_cancel"
#: What a member's worker sends the scheduler, in its stream of task states, when the function has been left.
LEAVE = "dask_gpu_mpi_gang_leave"
#: Characters of an exception that are part of a message; the exception itself is the cause.
MOST_OF_EXCEPTION = 300


def no_result(gang: str) -> str:
    """What a member's task returns where its function has returned nothing, since it failed or the gang is over."""
    return f"__dask_gpu_mpi_no_result__{gang}"


def is_number(value: Any) -> bool:
    """Whether it is a finite number.

    >>> [is_number(value) for value in (1, 0.5, True, None, float("nan"))]
    [True, True, False, False, False]
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def one_line(text: str) -> str:
    r"""Make a text of others part of a message: one line, of bounded length.

    >>> one_line("Error\n  in a task")
    'Error in a task'
    """
    line = " ".join(text.split())
    return line if len(line) <= MOST_OF_EXCEPTION else f"{line[: MOST_OF_EXCEPTION - 3]}..."


class State(StrEnum):
    """What an answer of the scheduler begins with, under ``state``."""

    #: The gang has its workers; it has started; a round is complete.
    GOOD = "good"
    #: The gang can't be: a worker without a nanny, say.
    REFUSED = "refused"
    #: The gang is over, and why.
    OVER = "over"
    #: This one wait was too long; the gang goes on.
    LATE = "late"
