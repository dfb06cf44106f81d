"""The MPI library and its quirks, messages between ranks, and watchdogs."""
