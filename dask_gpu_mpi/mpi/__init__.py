"""The ways in which ranks meet, the MPI library and its quirks, and watchdogs."""
