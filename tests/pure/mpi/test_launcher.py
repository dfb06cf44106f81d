"""A launcher that does not end, and the end of a job in which others do not respond. Its ports: tests/intruders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from dask_gpu_mpi.mpi import launcher
from dask_gpu_mpi.mpi.launcher import look_after_launcher
from support.mocks.launchers import SAMPLES

# -- a launcher that does not end


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


def look(monkeypatch: pytest.MonkeyPatch, name: str, pid: int, patience: float) -> None:
    above = SimpleNamespace(pid=pid, name=lambda: name)
    monkeypatch.setattr(launcher, "_launcher_above", lambda rank: [above])
    monkeypatch.setattr(launcher, "LAUNCHER_PATIENCE", patience)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it is meant to outlive its parent
        look_after_launcher()


def test_a_launcher_that_does_not_end_is_killed(
    deaf: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(monkeypatch, "mpirun", deaf.pid, 0.1)
    assert deaf.wait(20) == -signal.SIGKILL
    said = (tmp_path / "stderr").read_text()  # where the launcher's own words go
    assert said == "dask_gpu_mpi: the launcher has not ended 0.1 s after the job was aborted: it is killed\n"


def test_no_process_but_a_launcher_that_does_not_end_is_killed(
    deaf: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look(monkeypatch, "mpirun", deaf.pid, 600)  # one that ends
    assert deaf.stdin is not None
    deaf.stdin.close()
    assert deaf.wait(20) == 0
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    look(monkeypatch, "prted", os.getpid(), 0.0)  # on another node
    look(monkeypatch, "mpirun", 2**22 + 1, 0.0)  # one that has ended


# -- the end of a job in which others do not respond


END = "import os\nfrom dask_gpu_mpi.mpi.launcher import end_job\nprint('printed', end='')\nend_job(3, os.environ)\n"
HYDRA = SAMPLES["the mpiexec of MPICH or Intel MPI (Hydra)"]


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        (SAMPLES["Open MPI's mpirun"], 3, ""),
        ({}, 3, ""),
        (HYDRA, -signal.SIGKILL, ""),
        (HYDRA | {"PMI_SIZE": "1"}, 3, ""),
        (HYDRA | {"PMI_RANK": "x"}, 3, ""),
        (SAMPLES["srun"], 3, "scancel --signal=KILL 7.0"),
    ],
    ids=["mpirun", "none", "Hydra", "alone", "odd", "srun"],
)
@pytest.mark.parametrize("wrapper", [False, True])
def test_how_a_rank_ends_its_job(
    variables: Mapping[str, str], code: int, said: str, wrapper: bool, tmp_path: Path
) -> None:
    """What it has printed comes first. A wrapper script would make an exit code of the signal."""
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "scancel $*" > "{tmp_path}/said"\n')
    scancel.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | dict(variables)
    line = [sys.executable, "-c", END]
    if wrapper:
        line = ["sh", "-c", '"$@"; exit $?', "sh", *line]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "printed", "")
    file = tmp_path / "said"
    assert (file.read_text().strip() if file.exists() else "") == said
