"""What the ranks of a job do together: start, serve, end. The only room that talks MPI and Dask at once."""
