"""The command `check`: each rank observes, rank 0 applies the rules, one report."""
