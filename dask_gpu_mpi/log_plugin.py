"""The plugin that gives a worker a log file of its own; apart from `logs` because it has to import Dask."""

from __future__ import annotations

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from .logs import log_to_file

__all__ = ["LogFile"]


class LogFile(WorkerPlugin):
    """Sends the log of a worker's process to a file.

    Parameters
    ----------
    directory : str
        The user's log directory.
    file : str
        Name of the file, without its ending.
    """

    name = "dask_gpu_mpi-log"

    def __init__(self, directory: str, file: str) -> None:
        self.directory = directory
        self.file = file

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        log_to_file(self.directory, self.file)
