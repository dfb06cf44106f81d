"""Dask's configuration: import it, and find out what the user has configured in it."""

from __future__ import annotations

from typing import Any

from dask_gpu_mpi.errors import InputError


def import_config() -> Any:
    """Import `dask.config`, which reads the configuration; an InputError if one of its files is malformed."""
    try:
        import dask.config
    # the last two: a variable that is nested too deeply
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"Dask's configuration can't be read: {' '.join(str(error).split())}",
            fix="correct or remove that file",
        ) from None
    return dask.config


def is_configured(key: str) -> bool:
    """Whether the user has set this key of Dask's configuration: in a file, in the environment or in the program."""
    import dask.config

    value = dask.config.get(key, None)
    # distributed registers its defaults when it is imported
    defaults = [dask.config.get(key, None, config=dict(known)) for known in dask.config.defaults]
    return value is not None and value not in defaults
