"""What another user may have put into a folder that everyone may write."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dask_gpu_mpi.base import safe_paths


def links_are_strangers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let everyone write the folder, as in /tmp, and take every symbolic link for another user's."""
    folder.chmod(0o1777)
    monkeypatch.setattr(safe_paths, "is_ours", lambda status: not stat.S_ISLNK(status.st_mode))
