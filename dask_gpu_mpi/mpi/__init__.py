"""The ways in which ranks meet, the MPI library and its quirks, ranks that never come, and the launcher."""
