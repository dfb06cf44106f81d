"""The process beside each rank in which Dask runs: its start, fork server, scheduler and orders. Nothing here touches MPI."""
