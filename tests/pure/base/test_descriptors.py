"""The limit of open descriptors, in processes of their own: it can be lowered only once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dask_gpu_mpi.base.streams import away_from_here, leave_directory

RAISE = """
import resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from dask_gpu_mpi.base import streams as descriptors
descriptors.MOST = 600
descriptors.raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(100, 500, "500 500"), (100, 700, "600 700"), (650, 700, "650 700"), (500, 500, "500 500")],
    ids=["to the hard limit", "not without end", "never lowered", "nothing to raise"],
)
def test_the_soft_limit_follows_the_hard_one(soft: int, hard: int, raised: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISE, str(soft), str(hard)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == raised


def test_a_library_is_loaded_away_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with away_from_here():
        assert os.getcwd() == "/"
    assert os.getcwd() == str(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    with away_from_here():
        assert os.getcwd() == "/"
    with pytest.raises(FileNotFoundError):
        os.getcwd()


def test_a_thread_may_leave_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []

    def leave() -> None:
        if leave_directory():
            found.append(os.getcwd())

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(10)
    assert found in (["/"], [])  # a container may forbid it
    assert os.getcwd() == str(tmp_path)
