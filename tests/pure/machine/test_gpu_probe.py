"""A rank's look at its GPUs: by a child of its agent, which is gone afterwards, whatever NVML does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.machine.gpu_probe import nvml_grace
from support.jobs.clusters import alive, until
from support.jobs.processes import run_python
from support.mocks.gpus import SimHost, compile_library, emulated_environ, make_gpus

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="there is no NVML elsewhere"),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"),
]

#: Looks by a child, and prints what was seen or what became of the child.
LOOK = """
import os, pathlib, sys
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.machine.gpu_probe import Look, collect, start_look

read, write = os.pipe()
pid = start_look(write, close=[read], rank=os.getpid())
look = Look(read)
try:
    found = look.gpus(float(sys.argv[1]))
    print(found)
except DaskGpuMpiError as error:
    found = error
    print(error.exit_code, error)
print("libnvidia-ml" in pathlib.Path("/proc/self/maps").read_text(), "pynvml" in sys.modules, look.fd >= 0)
if found is not None:
    collect(pid)
"""

#: Starts an agent whose child looks and hangs, prints their process ids, and kills the agent or itself.
DIE = """
import os, pathlib, signal, sys, time
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.options.model import Options

agent = AgentProcess(os.environ)
agent.begin(Options(worker_class="dask_cuda.CUDAWorker"), os.environ)
limit = time.monotonic() + 20
while not os.path.exists(os.environ["CALLED"]) and time.monotonic() < limit:
    time.sleep(0.01)
print(agent.pid, pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text(), flush=True)
os.kill(agent.pid if sys.argv[1] == "agent" else os.getpid(), signal.SIGKILL)
agent.close(5.0)
"""

#: NVML's first function: it tells that it was called, and goes on as told.
LIBRARY = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int nvmlInitWithFlags(unsigned flags) { close(open(getenv("CALLED"), O_CREAT | O_WRONLY, 0600)); %s; return flags; }
"""


def broken(tmp_path: Path, what: str) -> dict[str, str]:
    source = tmp_path / "nvml.c"
    source.write_text(LIBRARY % what)
    compile_library(source, tmp_path / "libnvidia-ml.so.1")
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CALLED": str(tmp_path / "called")}


def answer(environ: dict[str, str], seconds: float = 20.0) -> str:
    """What was answered, in a process that has not asked NVML itself."""
    done: subprocess.CompletedProcess[str] = run_python(LOOK, str(seconds), env=environ)
    assert done.stderr == ""
    found, untouched = done.stdout.splitlines()
    assert untouched == f"False False {found == 'None'}"  # the descriptor is closed with the answer
    return found


def test_gpus_and_a_driver_that_is_the_users_to_mend() -> None:
    gpus = make_gpus(1, host="one")
    assert gpus[0].uuid in answer(emulated_environ({"*": SimHost(gpus)}))
    refused = SimHost(gpus, init_fail="NO_PERMISSION")
    assert answer(emulated_environ({"*": refused})).startswith("2 NVML does not start: ")


@pytest.mark.parametrize("what", ["abort()", "_exit(3)"])
def test_an_nvml_that_dies(tmp_path: Path, what: str) -> None:
    assert "ended without an answer" in answer(broken(tmp_path, what))


def test_an_nvml_that_hangs(tmp_path: Path) -> None:
    assert answer(broken(tmp_path, "sleep(60)"), 0.5) == "None"


@pytest.mark.parametrize("who", ["agent", "rank"])
def test_it_dies_with_the_agent_and_the_rank(tmp_path: Path, who: str) -> None:
    done = run_python(DIE, who, env=broken(tmp_path, "sleep(60)"))
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    for pid in pids:
        until(lambda pid=pid: not alive(pid), 10)


def test_how_long_before_the_deadline_it_is_reported() -> None:
    """A part of the timeout, between a least and a most."""
    assert [nvml_grace(timeout) for timeout in (5.0, 60.0, 600.0)] == [2.0, 6.0, 15.0]
