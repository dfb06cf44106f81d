"""The process beside each rank in which Dask runs: scheduler, nannies, workers. Nothing here touches MPI."""
