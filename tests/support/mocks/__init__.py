"""Mocks of libraries, commands and GPUs, and made-up data of jobs."""
