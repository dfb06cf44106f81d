"""The process that keeps the CUDA driver up: it ends when it is let go, and with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusters import alive, until
from dask_gpu_mpi import driver
from dask_gpu_mpi.early import start_driver
from dask_gpu_mpi.options import resolve

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc; there is no CUDA elsewhere"
)

#: Makes one, says who it is, and lets it go or dies without a word.
PROGRAM = """
import os, sys, time
from dask_gpu_mpi.driver import Driver

driver = Driver(os.environ)
print(driver._process.pid, flush=True)
if sys.argv[1] == "release":
    pid = driver._process.pid
    driver.release()
    driver.release()
    limit = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < limit:
        time.sleep(0.01)
    print("collected" if time.monotonic() < limit else "left")
else:
    assert os.path.exists(f"/proc/{driver._process.pid}")
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


#: Open MPI's variables of the first and of the second rank on a host.
FIRST, SECOND = (
    {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank}
    for rank in "01"
)


@pytest.mark.parametrize(
    ("given", "environ", "begun"),
    [
        ({"worker_class": "dask_cuda.CUDAWorker"}, FIRST, True),
        ({"worker_class": "dask_cuda.CUDAWorker"}, {}, True),
        ({"worker_class": "dask_cuda.CUDAWorker"}, SECOND, False),
        ({"worker_class": "dask_cuda.CUDAWorker"}, FIRST | {"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"worker_class": "dask_cuda.CUDAWorker"}, FIRST | {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, False),
        ({"worker_class": "distributed.Nanny"}, FIRST, False),
    ],
)
def test_one_on_each_host_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: dict[str, str],
    environ: dict[str, str],
    begun: bool,
) -> None:
    monkeypatch.setattr(driver, "MPS", str(tmp_path / "none"))
    options = resolve(given, source="keyword")
    found = start_driver(options, {"PATH": os.environ["PATH"]} | environ)
    assert (found is not None) is begun
    if found is not None:
        assert found._process is not None
        pid = found._process.pid
        assert alive(pid)
        found.release()
        until(lambda: not alive(pid), 10)
