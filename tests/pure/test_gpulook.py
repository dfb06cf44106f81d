"""A rank's look at its GPUs: by a child, which is gone afterwards, whatever NVML does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusters import alive, until
from simulated.nvml import GIB, SimHost, compile_library, compile_nvml, make_gpus, simulated_environ

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="there is no NVML elsewhere"),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"),
]

PROGRAM = """
import os, pathlib, sys, threading, time
from dask_gpu_mpi.gpulook import GpuLook, may_fork

assert may_fork()
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()  # as a script may have
look = GpuLook(os.environ)
pid = look._pid
print(pid, flush=True)
if sys.argv[1] == "die":
    while not os.path.exists(os.environ["CALLED"]):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
found = look.result(float(sys.argv[1]))
limit = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}") and time.monotonic() < limit:
    time.sleep(0.01)
assert time.monotonic() < limit, "it was not collected"
print(None if found is None else ",".join(gpu.uuid + ":" + str(len(gpu.processes)) for gpu in found))
print("libnvidia-ml" in pathlib.Path("/proc/self/maps").read_text(), "pynvml" in sys.modules)
"""

#: NVML's first function: it tells that it was called, and goes on as told.
LIBRARY = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int nvmlInitWithFlags(unsigned flags) { close(open(getenv("CALLED"), O_CREAT | O_WRONLY, 0600)); %s; return flags; }
"""


def look(environ: dict[str, str], how: str = "10") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, how]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def broken(tmp_path: Path, what: str) -> dict[str, str]:
    source = tmp_path / "nvml.c"
    source.write_text(LIBRARY % what)
    compile_library(source, tmp_path / "libnvidia-ml.so.1")
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CALLED": str(tmp_path / "called")}


def test_it_sees_what_the_rank_sees(tmp_path: Path) -> None:
    gpus = make_gpus(3, host="one", memory=80 * GIB)
    environ = simulated_environ(compile_nvml(tmp_path), gpus) | {"CUDA_VISIBLE_DEVICES": "2,0"}
    done = look(environ)
    assert done.stdout.splitlines()[1:] == [f"{gpus[2].uuid}:0,{gpus[0].uuid}:0", "False False"]
    assert done.stderr == ""


@pytest.mark.parametrize("visible", [None, "7"])
def test_what_is_wrong_is_left_to_who_asks_next(tmp_path: Path, visible: str | None) -> None:
    host = SimHost(make_gpus(1, host="one"), init_fail="UNKNOWN" if visible else "NO_PERMISSION")
    environ = simulated_environ(compile_nvml(tmp_path), {"*": host})
    done = look(environ | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert done.stdout.splitlines()[1:] == ["None", "False False"]
    assert done.stderr == ""


@pytest.mark.parametrize("what", ["sleep(60)", "abort()", "_exit(3)"])
def test_an_nvml_that_hangs_or_dies(tmp_path: Path, what: str) -> None:
    environ = broken(tmp_path, what)
    done = look(environ, "2" if "sleep" in what else "10")
    assert done.stdout.splitlines()[1:] == ["None", "False False"], done.stderr
    assert done.stderr == ""
    assert (tmp_path / "called").exists()


def test_it_dies_with_the_rank(tmp_path: Path) -> None:
    done = look(broken(tmp_path, "sleep(60)"), "die")
    assert done.returncode == -9
    until(lambda: not alive(int(done.stdout)), 10)


def test_not_where_mpi_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_gpu_mpi.gpulook import may_fork

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    assert not may_fork()
