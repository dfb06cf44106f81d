"""Tasks that fork and start programs, workers above their memory limit: SIGTERM there, and the end of all their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs.clusters import INITIALIZED
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

POOLS = script("mpi/scripts/pools.py")


@pytest.mark.parametrize(
    ("worker_class", "method"), [("distributed.Nanny", "fork"), ("distributed.Worker", "forkserver")]
)
def test_pools(mpirun: Mpi, worker_class: str, method: str) -> None:
    """They end, and what a task has left running ends with its worker."""
    done = mpirun.run(POOLS.replace("CLASS", worker_class).replace("METHOD", method), 2).check()
    assert done.stdout == "[(5, -15), (5, -15)]\n"


@pytest.mark.both_mpis
@pytest.mark.parametrize("restarts", [False, True])
def test_a_program_that_a_task_leaves_behind(mpirun: Mpi, restarts: bool) -> None:
    """It has the job's output open, for which a launcher waits. It ends with the job, also if its worker was killed before."""
    program = f"""
        import subprocess
        from distributed import Event

        def program():
            with subprocess.Popen(["sleep", "300"]):
                Event("started").set()

        with Client() as client:
            future = client.submit(program)
            Event("started").wait(30)
            if {restarts}:
                future.release()
                client.restart()
            print("end of script")
    """
    done = mpirun.run(program, 2, begin=INITIALIZED).check()
    assert done.stdout == "end of script\n"
    (line,) = (line for line in done.stderr.splitlines() if "1 program that tasks had started" in line)
    assert "sleep (process " in line


def test_a_worker_ends_as_python_does(mpirun: Mpi, tmp_path: Path) -> None:
    """What tasks have registered with `atexit` is called, and files that they have left open are written."""
    program = """
        from pathlib import Path

        def task(folder, dask_worker):
            import atexit, builtins, sys, types
            builtins.kept = open(f"{folder}/kept-{dask_worker.name}", "w")
            builtins.kept.write("a line")
            atexit.register(Path(folder, f"atexit-{dask_worker.name}").touch)
            # as numba's, which would write an escape sequence into the job's output
            sys.modules["colorama.initialise"] = module = types.ModuleType("colorama.initialise")
            module.reset_all = lambda: print("reset")
            atexit.register(module.reset_all)

        with Client() as client:
            client.run(task, str(Path.cwd()))
    """
    assert mpirun.run(program, 2, begin=INITIALIZED, cwd=tmp_path).check().stdout == ""
    assert {file.name for file in tmp_path.glob("atexit-*")} == {"atexit-0", "atexit-1"}
    assert [file.read_text() for file in tmp_path.glob("kept-*")] == ["a line", "a line"]


def test_the_memory_limit_ends_a_worker(mpirun: Mpi) -> None:
    program = """
        import os, time
        from dask_gpu_mpi import initialize
        initialize(memory_limit="600 MiB")
        from distributed import Client, KilledWorker

        def fill():
            block = bytearray(os.urandom(1 << 20) * 700)
            time.sleep(60)

        with Client() as client:
            try:
                client.submit(fill).result()
            except KilledWorker:
                print("killed")
    """
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    done = mpirun.run(program, 1, env=env).check()
    assert done.stdout == "killed\n"
    assert done.stderr.count("memory budget. Restarting") == 1
    assert "slow to accept" not in done.stderr
