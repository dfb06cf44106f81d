"""What client, scheduler and members of a gang tell each other: names of handlers, and answers as plain data."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["CANCEL", "MOST_SECONDS", "PLUGIN", "State", "no_result"]

#: Most seconds of a limit: clocks and timers take three years everywhere.
MOST_SECONDS = 100_000_000
#: The scheduler's plugin.
PLUGIN = "dask_gpu_mpi-gangs"
#: What the scheduler sends a member's worker when the gang is over.
CANCEL = "dask_gpu_mpi_gang_cancel"


def no_result(gang: str) -> str:
    """What a member's task returns where its function has returned nothing, since it failed or the gang is over."""
    return f"__dask_gpu_mpi_no_result__{gang}"


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
