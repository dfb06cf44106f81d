"""Fixtures of the tests without MPI."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import files


@pytest.fixture
def links_are_strangers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Call it to let everyone write `tmp_path`, as in /tmp, and to take every symbolic link for another user's."""

    def call() -> None:
        tmp_path.chmod(0o1777)
        monkeypatch.setattr(files, "is_ours", lambda status: not stat.S_ISLNK(status.st_mode))

    return call


@pytest.fixture
def dask_config() -> Iterator[None]:
    """Dask's configuration, its defaults and its paths are afterwards what they were."""
    import dask

    lists = [(each, list(each)) for each in (dask.config.defaults, dask.config.paths)]
    config = copy.deepcopy(dask.config.config)
    yield
    dask.config.config.clear()
    dask.config.config.update(config)
    for each, before in lists:
        each[:] = before
