"""Names by which the processes of a job find what is recorded of it."""

from __future__ import annotations

__all__ = ["DEATHS_TOPIC", "JOB_PLUGIN", "METRIC", "RECORD_OPERATION"]

#: Operation of the scheduler that answers with its record (`diagnostics.recorder`).
RECORD_OPERATION = "gpu_mpi_record"
#: Dask's topic of events for the deaths of workers' processes: who, how, its last output.
DEATHS_TOPIC = "dask-gpu-mpi-deaths"
#: The scheduler's plugin that follows which workers come and go (`diagnostics.job_watch`).
JOB_PLUGIN = "dask_gpu_mpi-job"
#: Key of our own metric among those of a worker's heartbeat (`workers.figures`).
METRIC = "gpu_mpi"
