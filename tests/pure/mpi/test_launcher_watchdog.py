from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi.watchdogs import look_after_launcher


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not mind SIGTERM."""
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=stderr) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def look(pid: int | None, patience: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it is meant to outlive its parent
        look_after_launcher(pid, patience)


def test_a_launcher_that_does_not_end_is_killed(deaf: subprocess.Popen[bytes], tmp_path: Path) -> None:
    look(deaf.pid, 0.1)
    assert deaf.wait(20) == -signal.SIGKILL
    said = (tmp_path / "stderr").read_text()  # where the launcher's own words go
    assert said == "dask_gpu_mpi: the launcher has not ended 0.1 s after the job was aborted: it is killed\n"


def test_one_that_ends_is_not(deaf: subprocess.Popen[bytes]) -> None:
    look(deaf.pid, 600)
    assert deaf.stdin is not None
    deaf.stdin.close()
    assert deaf.wait(20) == 0


def test_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("this process's parent is no launcher")

    monkeypatch.setattr(subprocess, "Popen", never)
    look(None, 0.0)
    # and one that has ended is nobody
    look(2**22 + 1, 0.0)
