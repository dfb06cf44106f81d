"""Start MPI jobs, read their output, and inspect their processes from outside."""
