"""Small parts that know nothing of Dask, MPI or GPUs."""
