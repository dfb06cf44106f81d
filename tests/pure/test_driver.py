"""The process that keeps the CUDA driver up: it ends when it is let go, and with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusters import alive, until
from dask_gpu_mpi import driver

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc; there is no CUDA elsewhere"
)

#: Makes one, says who it is, and lets it go or dies without a word.
PROGRAM = """
import os, sys, time
from dask_gpu_mpi.driver import Driver

driver = Driver([])
print(driver._pid, flush=True)
if sys.argv[1] == "release":
    pid = driver._pid
    driver.release()
    driver.release()
    limit = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < limit:
        time.sleep(0.01)
    print("collected" if time.monotonic() < limit else "left")
else:
    assert os.path.exists(f"/proc/{driver._pid}")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["release", "die"])
def test_it_ends(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=30)
    pid, *words = done.stdout.split()
    if how == "release":
        assert words == ["collected"], done.stderr
    else:
        assert done.returncode == -9
        until(lambda: not alive(int(pid)), 10)


def test_not_beside_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "MPS", str(tmp_path / "mps"))
    assert driver.may_be_kept_up({})
    assert not driver.may_be_kept_up({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})
    os.mkdir(tmp_path / "mps")
    assert not driver.may_be_kept_up({})
