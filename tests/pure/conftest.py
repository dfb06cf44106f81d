"""Fixtures of the tests without MPI."""

from __future__ import annotations

import stat
from collections.abc import Callable
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
