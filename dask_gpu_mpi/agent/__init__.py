"""The process next to each rank in which Dask runs: its start, fork server, scheduler and orders. Nothing here uses MPI."""
