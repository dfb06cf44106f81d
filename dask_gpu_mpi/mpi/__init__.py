"""Launchers, the batch system, the MPI library, and the ranks of one host."""
