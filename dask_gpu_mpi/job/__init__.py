"""A rank of a running cluster: the user's calls, the rank until the end, and the end of all ranks."""
