"""From the ranks of a job to a running cluster: each rank registers, rank 0 plans, everybody gets its part."""
