"""A rank of a running cluster: what the user calls, what a rank does until the end, and the end of all ranks."""
