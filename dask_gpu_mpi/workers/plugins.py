"""What runs inside every worker's process; apart from `logs` and `factory`, since it imports Dask.

`distributed` sends plugins to the process by pickle, with the worker's other options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import pickle

from .logs import log_to_file

if TYPE_CHECKING:
    from dask_gpu_mpi.plan.model import WorkerPlan

__all__ = ["Label", "LogFile", "plugins_of"]


def plugins_of(plan: WorkerPlan, log_directory: str | None) -> Iterator[WorkerPlugin]:
    """What runs inside this worker: the label on its tasks' exceptions, and its log file, if there is a log directory."""
    gpu = f", GPU {plan.device}" if plan.device else ""
    yield Label(f"[raised by worker {plan.name}, rank {plan.rank} on host {plan.host}{gpu}]")
    if log_directory is not None:
        gpu = f"-{plan.device[:12]}" if plan.device else ""
        yield LogFile(log_directory, f"worker-{plan.name}-{plan.host}{gpu}")


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


class Label(WorkerPlugin):
    """Notes on the exception of a failed task where it failed, which its traceback in the script then ends with (PEP 678).

    Parameters
    ----------
    text : str
        The note.
    """

    name = "dask_gpu_mpi-label"

    def __init__(self, text: str) -> None:
        self.text = text

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by distributed when a task's state changes, before the scheduler is told."""
        if finish != "error" or start == "memory":
            return
        try:
            carried: Any = self._worker.state.tasks[key].exception
            error = pickle.loads(carried.data)  # type: ignore[no-untyped-call]
            error.add_note(self.text)
            carried.data = pickle.dumps(error)  # type: ignore[no-untyped-call]
        # an exception of the user's that can't be pickled a second time is worth more than its label
        except Exception:
            return
