"""The preflight: each rank observes, rank 0 judges, one report."""
