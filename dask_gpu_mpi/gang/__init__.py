"""Gangs: one function that runs on many workers at the same time, on all or on none."""
