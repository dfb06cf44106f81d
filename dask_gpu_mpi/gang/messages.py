"""What client, scheduler and members of a gang tell each other: names of handlers, and answers as plain data."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["CANCEL", "PLUGIN", "State"]

#: The scheduler's plugin.
PLUGIN = "dask_gpu_mpi-gangs"
#: What the scheduler sends a member's worker when the gang is over.
CANCEL = "dask_gpu_mpi_gang_cancel"


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
