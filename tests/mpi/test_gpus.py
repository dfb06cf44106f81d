"""The main job on GPUs that are emulated: the unmodified CUDAWorker, one for each, seen from inside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, TELL, facts
from support.jobs.gpus import SCRIPT, SOCKETS, check_workers
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, compile_library, make_gpus

#: After `SCRIPT`: which workers watch a GPU.
TELL_MONITORED = """
def monitored(dask_worker):
    return dask_worker.name, "gpu_utilization" in dask_worker.monitor.quantities
tell(monitored=dict(client.run(monitored).values()))
"""
#: After `SCRIPT`: whether this rank has asked NVML, and children of its agent that nobody has collected.
TELL_TIDY = """
import os, pathlib, pynvml
def children(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
states = [pathlib.Path(f"/proc/{pid}/stat").read_text() for agent in children(os.getpid()) for pid in children(agent)]
tell(asked=pynvml.nvmlLib is not None, zombies=[state for state in states if ") Z " in state])
"""
#: After `SCRIPT`: the ports of the workers.
TELL_PORTS = """
tell(ports=[int(address.rpartition(":")[2]) for address in client.run(lambda: None)])
"""
#: By which method data frames are shuffled here, in a child, and where the script says so.
SHUFFLE = """
import subprocess
ASK = "import dask; print(dask.config.get('dataframe.shuffle.method'))"
def ask():
    return subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
import dask
before = dask.config.get("dataframe.shuffle.method")
with dask.config.set({"dataframe.shuffle.method": "disk"}):
    tell(here=before, child=ask(), own=dask.config.get("dataframe.shuffle.method"))
"""
#: Where the second node is not there, as on most machines, a preference for it ends nothing.
GPUS = [
    replace(gpu, node=place % 2)
    for place, gpu in enumerate(make_gpus(4, host="one", memory=80 * GIB, cores=SOCKETS))
]


@pytest.mark.quick
def test_one_rank_and_a_cpu_worker(mpirun: Mpi) -> None:
    script = SCRIPT + TELL_MONITORED + TELL_PORTS + TELL_TIDY + SHUFFLE
    options = ["--cpu-workers", "1", "--worker-options", '{"worker_port": "29310:29399"}']
    done = mpirun.run(script, 1, command=options, gpus=GPUS).check()
    told = facts(done)
    # each of them takes a port of the range, though to CUDAWorker it is the only one of its node
    assert len(told["ports"]) == 5
    assert all(29310 <= port <= 29399 for port in told["ports"])
    gpu_names = [f"0-{index}" for index in range(4)]
    expected = {name: [gpu] for name, gpu in zip(gpu_names, GPUS, strict=True)}
    check_workers(told, GPUS, expected, cpu_workers=["0-cpu-0"])
    # on the dashboard, too, it has no GPU: it would be the first one's load
    assert told["monitored"] == dict.fromkeys(gpu_names, True) | {"0-cpu-0": False}
    # what NVML leaves in a process is gone with the child that has asked it
    assert not told["asked"], "the rank itself has loaded NVML"
    assert told["zombies"] == []
    # workers without a GPU leave shuffles to Dask
    assert (told["here"], told["child"], told["own"]) == (None, "None", "disk")
    assert done.left == ()
    alone = mpirun.run([*COMMAND, "plan", "--cpu-workers", "1", "--json"], 1, gpus=GPUS).check()
    assert json.loads(alone.stdout) == told["plan"]


def test_a_script_that_computes_while_it_starts(mpirun: Mpi) -> None:
    # OpenBLAS stops its threads before a fork, and waits for ever where one of the script's is at work
    before = """
import threading
import numpy as np
from dask_gpu_mpi import initialize

stop = threading.Event()
def compute():
    values = np.ones((500, 500))
    while not stop.is_set():
        values @ values
thread = threading.Thread(target=compute)
thread.start()
try:
    initialize(startup_timeout=60)
finally:
    stop.set()
    thread.join()
"""
    env = {"OPENBLAS_NUM_THREADS": "2"}
    told = facts(mpirun.run(SCRIPT, 1, begin=before, gpus=GPUS[:1], env=env).check())
    check_workers(told, GPUS, {"0-0": GPUS[:1]})


def test_gpus_without_dask_cuda(mpirun: Mpi, tmp_path: Path) -> None:
    """One report with the fix, and CPU workers for who asks for them."""
    (tmp_path / "dask_cuda.py").write_text("raise ModuleNotFoundError('no dask_cuda', name='dask_cuda')\n")
    script = "from distributed import Client\nprint(len(Client().scheduler_info()['workers']))\n"
    how: dict[str, Any] = {"gpus": GPUS, "path": tmp_path}
    done = mpirun.run(script, 2, command=[], **how)
    done.refused("GPU workers need dask-cuda, which is not installed here. Fix: pip install")
    done = mpirun.run(script, None, command=["--worker-class", "distributed.Nanny"], **how).check()
    assert done.stdout.split() == ["1"]


def hanging_nvml(tmp_path: Path) -> dict[str, str | None]:
    """The environment of a host whose driver hangs."""
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <unistd.h>\nint nvmlInitWithFlags(unsigned flags) { sleep(600); return flags; }\n"
    )
    compile_library(source, tmp_path / "libnvidia-ml.so.1")
    return {"CUDA_VISIBLE_DEVICES": None, "LD_LIBRARY_PATH": str(tmp_path)}


def test_what_the_agent_refuses_comes_before_an_nvml_that_hangs(mpirun: Mpi, tmp_path: Path) -> None:
    done = mpirun.run("", 1, command=["--local-directory", "/proc/none"], env=hanging_nvml(tmp_path))
    done.refused("the local directory '/proc/none' can't be written")


@pytest.mark.parametrize(("ranks", "what"), [(2, "job"), (1, "plan")])
def test_an_nvml_that_hangs_ends_the_job(mpirun: Mpi, tmp_path: Path, ranks: int, what: str) -> None:
    (tmp_path / "job").write_text("print('ran')\n")
    environ = hanging_nvml(tmp_path) | {"DASK_GPU_MPI__STARTUP_TIMEOUT": "12"}
    done = mpirun.run([*COMMAND, what], ranks, env=environ, cwd=tmp_path).check(1)
    assert "ran" not in done.stdout
    assert 1 <= done.stderr.count("NVML did not respond before the start-up timeout") <= ranks
    assert f"rank 0 of {ranks} on " in done.stderr
    assert "Traceback" not in done.stderr


SETS = "import dask, dask_gpu_mpi\ndask.config.set({'dataframe.shuffle.method': 'p2p'})\ndask_gpu_mpi.initialize()\n"


@pytest.mark.parametrize(
    ("begin", "env", "here", "child"),
    [
        ("", {}, "tasks", "tasks"),
        ("", {"DASK_DATAFRAME__SHUFFLE__METHOD": "p2p"}, "p2p", "p2p"),
        (SETS, {}, "p2p", "None"),
    ],
    ids=["command", "a variable", "the program"],
)
def test_shuffles_are_by_tasks_on_gpus(
    mpirun: Mpi, begin: str, env: dict[str, str | None], here: str, child: str
) -> None:
    command = None if begin else []
    done = mpirun.run(TELL + SHUFFLE, 1, begin=begin, command=command, gpus=GPUS[:2], env=env).check()
    assert facts(done) == {"here": here, "child": child, "own": "disk"}
