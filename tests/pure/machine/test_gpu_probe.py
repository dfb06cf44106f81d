"""A rank's look at its GPUs: by a child of its agent, which is gone afterwards, whatever NVML does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs.clusters import alive, until
from support.jobs.processes import run_python
from support.mocks.gpus import SimHost, compile_library, emulated_environ, make_gpus

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="there is no NVML elsewhere"),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler"),
]

#: Starts an agent whose child looks, says who they are, and what was seen or what became of them.
PROGRAM = """
import os, pathlib, signal, sys, time
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.options.model import Options

def until(true):
    limit = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)

agent = AgentProcess(os.environ)
agent.begin(Options(worker_class="dask_cuda.CUDAWorker"), os.environ)
assert agent.looks
if "CALLED" in os.environ:
    until(lambda: os.path.exists(os.environ["CALLED"]))
if sys.argv[1] == "die":
    children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    print(agent.pid, children, flush=True)
    os.kill(agent.pid if sys.argv[2] == "agent" else os.getpid(), signal.SIGKILL)
    try:
        agent.look.gpus(10.0)
    except DaskGpuMpiError as error:
        print(error.exit_code, error)
else:
    try:
        print(agent.look.gpus(float(sys.argv[1])))
    except DaskGpuMpiError as error:
        print(error.exit_code, error)
    print("libnvidia-ml" in pathlib.Path("/proc/self/maps").read_text(), "pynvml" in sys.modules)
agent.close(5.0)
"""

#: NVML's first function: it tells that it was called, and goes on as told.
LIBRARY = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int nvmlInitWithFlags(unsigned flags) { close(open(getenv("CALLED"), O_CREAT | O_WRONLY, 0600)); %s; return flags; }
"""


def look(environ: dict[str, str], *how: str) -> subprocess.CompletedProcess[str]:
    return run_python(PROGRAM, *(how or ("20",)), env=environ)


def broken(tmp_path: Path, what: str) -> dict[str, str]:
    source = tmp_path / "nvml.c"
    source.write_text(LIBRARY % what)
    compile_library(source, tmp_path / "libnvidia-ml.so.1")
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CALLED": str(tmp_path / "called")}


def answers(done: subprocess.CompletedProcess[str]) -> str:
    """What was answered, by a process that has not asked NVML itself."""
    answer, untouched = done.stdout.splitlines()
    assert (untouched, done.stderr) == ("False False", "")
    return answer


def test_what_is_wrong_with_a_driver_is_the_users_to_mend() -> None:
    broken = SimHost(make_gpus(1, host="one"), init_fail="NO_PERMISSION")
    assert answers(look(emulated_environ({"*": broken}))).startswith("2 NVML does not start: ")


@pytest.mark.parametrize("what", ["abort()", "_exit(3)"])
def test_an_nvml_that_dies(tmp_path: Path, what: str) -> None:
    assert "ended without an answer" in answers(look(broken(tmp_path, what)))


def test_an_nvml_that_hangs(tmp_path: Path) -> None:
    assert answers(look(broken(tmp_path, "sleep(60)"), "0.5")) == "None"


@pytest.mark.parametrize("who", ["agent", "rank"])
def test_it_dies_with_the_agent_and_the_rank(tmp_path: Path, who: str) -> None:
    done = look(broken(tmp_path, "sleep(60)"), "die", who)
    pids, *seen = done.stdout.splitlines()
    assert len(pids.split()) == 2, done.stderr
    assert all("ended without an answer" in line for line in seen), done.stderr
    assert len(seen) == (who == "agent")
    for pid in map(int, pids.split()):
        until(lambda pid=pid: not alive(pid), 10)
