"""The process next to each rank in which Dask runs: its start, fork server, scheduler, on rank 0 the hub. Nothing uses MPI."""
