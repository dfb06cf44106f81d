"""The process that keeps the CUDA driver up: it ends when it is let go, and with its parent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dask_gpu_mpi.agent import handle as driver
from dask_gpu_mpi.agent.handle import release_cuda_keepalive, start_cuda_keepalive
from dask_gpu_mpi.mpi.neighbours import launched_as
from dask_gpu_mpi.options.resolve import resolve
from support.jobs.clusters import alive, until
from support.jobs.processes import run_python
from support.mocks.gpus import compile_library

#: A driver that takes a minute, and tells that it was called.
SLOW_CUDA = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(int flags) { close(open(getenv("SLOW"), O_CREAT | O_WRONLY, 0600)); return flags + sleep(60); }
"""
#: Makes one, says who it is, and lets it go or dies without a word.
PROGRAM = """
import os, sys, time
from dask_gpu_mpi.agent.handle import release_cuda_keepalive, start_cuda_keepalive
from dask_gpu_mpi.options.model import Options

driver = start_cuda_keepalive(Options(worker_class="dask_cuda.CUDAWorker"), os.environ)
pid = driver.pid
print(pid, flush=True)
limit = time.monotonic() + 10
while "SLOW" in os.environ and not os.path.exists(os.environ["SLOW"]) and time.monotonic() < limit:
    time.sleep(0.01)
if sys.argv[1] == "release":
    release_cuda_keepalive(driver)
    limit = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < limit:
        time.sleep(0.01)
    print("collected" if time.monotonic() < limit else "left")
else:
    assert os.path.exists(f"/proc/{pid}")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["release", "die"])
@pytest.mark.parametrize("comes_up", [False, True], ids=["no driver", "while the GPUs come up"])
def test_it_ends(how: str, comes_up: bool, tmp_path: Path) -> None:
    """Within 10 s of its release or of its parent's death."""
    environ = dict(os.environ)
    if comes_up:
        (tmp_path / "cuda.c").write_text(SLOW_CUDA)
        compile_library(tmp_path / "cuda.c", tmp_path / "libcuda.so.1")
        environ |= {"LD_LIBRARY_PATH": str(tmp_path), "SLOW": str(tmp_path / "called")}
    done = run_python(PROGRAM, how, env=environ)
    pid, *words = done.stdout.split()
    if how == "release":
        assert words == ["collected"], done.stderr
    else:
        assert done.returncode == -9
        until(lambda: not alive(int(pid)), 10)
    assert (tmp_path / "called").exists() is comes_up


#: Open MPI's variables of the first and of the second rank on a host.
FIRST, SECOND = (
    {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank}
    for rank in "01"
)


@pytest.mark.parametrize(
    ("worker_class", "environ", "begun"),
    [
        ("dask_cuda.CUDAWorker", FIRST, True),
        ("dask_cuda.CUDAWorker", {}, True),
        ("dask_cuda.CUDAWorker", SECOND, False),
        ("dask_cuda.CUDAWorker", FIRST | {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("dask_cuda.CUDAWorker", FIRST | {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, False),
        ("distributed.Nanny", FIRST, False),
    ],
)
def test_one_on_each_host_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    worker_class: str,
    environ: dict[str, str],
    begun: bool,
) -> None:
    monkeypatch.setattr(driver, "MPS", str(tmp_path / "mps"))
    options = resolve({"worker_class": worker_class}, source="keyword")
    found = start_cuda_keepalive(options, {"PATH": os.environ["PATH"]} | environ)
    assert (found is not None) is begun
    if found is not None:
        (tmp_path / "mps").touch()  # MPS has been started
        assert start_cuda_keepalive(options, environ) is None
        pid = found.pid
        assert alive(pid)
        assert launched_as(pid) is None  # no second rank of that number
        release_cuda_keepalive(found)
        until(lambda: not alive(pid), 10)
