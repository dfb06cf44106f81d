"""Each example of the gallery, by one real job; on emulated GPUs where these make a difference."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support import ROOT
from support.jobs.clusters import COMMAND, Driver, ranks_of, until
from support.jobs.gallery import EXAMPLES, right, sections, skip_without
from support.jobs.gpus import gpu_environ
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, make_gpus

FOLDER = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(mpirun: Mpi, tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    skip_without(*example.packages)
    command = [*COMMAND, "--no-dashboard", *example.options, str(FOLDER / f"{name}.py")]
    done = mpirun.run(command, 2, cwd=tmp_path, timeout=110).check()
    # what the page shows
    assert right(done.stdout) == right(sections()[f"{name}.py"])


@pytest.mark.parametrize("options", ["all", "none"])
def test_cpu_workers_beside_gpus(mpirun: Mpi, options: str) -> None:
    skip_without("sklearn")
    name = "cpu_and_gpu"
    given = EXAMPLES[name].options if options == "all" else ()
    command = [*COMMAND, "--no-dashboard", *given, str(FOLDER / f"{name}.py")]
    env = gpu_environ(make_gpus(2, host="one", memory=80 * GIB))
    done = mpirun.run(command, 2, env=env).check()
    if options == "all":
        assert "loaded by ['0-cpu-0'], computed by ['0-0', '1-1']\n" in done.stdout
    else:
        assert "no CPU workers: the GPU workers have loaded as well. Fix: --cpu-workers 1\n" in done.stderr
    assert right(done.stdout) == right(sections()[f"{name}.py"])


@pytest.mark.slow
def test_a_trial_for_each_gpu(mpirun: Mpi, tmp_path: Path) -> None:
    skip_without(*EXAMPLES["hyperparameters"].packages)
    command = [*COMMAND, "--no-dashboard", "--cpu-workers", "1", str(FOLDER / "hyperparameters.py")]
    env = gpu_environ(make_gpus(2, host="one", memory=80 * GIB))
    done = mpirun.run(command, 2, env=env, cwd=tmp_path, timeout=110).check()
    lines = [line for line in done.stdout.splitlines() if "on worker" in line]
    assert len(lines) == 9
    assert all(line.endswith(("on worker 0-0", "on worker 1-1")) for line in lines), lines


@pytest.mark.slow
def test_interactive(mpirun: Mpi, tmp_path: Path) -> None:
    """A cluster, a process beside it, and a second job."""
    file = str(tmp_path / "cluster.json")
    first = mpirun.start([*COMMAND, "--no-dashboard", "--scheduler-file", file], 2)
    first.wait_for("2 workers on 1 host", stream="stderr")
    script = [
        "python",
        str(FOLDER / "interactive.py"),
        file,
        "--grow-to",
        "3",
        "--timeout",
        "60",
        "--shutdown",
    ]
    notebook = mpirun.start(script, None)
    notebook.wait_for("waiting for 3 workers")
    second = mpirun.start([*COMMAND, "--no-scheduler", "--scheduler-file", file], 1)
    done = notebook.wait(60).check()
    assert right(done.stdout) == right(sections()["interactive.py"])
    first.wait(30).check()
    second.wait(30).check()


@pytest.mark.slow
def test_training_continues_after_a_worker_was_killed(mpirun: Mpi, tmp_path: Path) -> None:
    skip_without(*EXAMPLES["ddp_digits"].packages)
    file = tmp_path / "cluster.json"
    options = ["--no-dashboard", "--scheduler-file", str(file)]
    command = [*COMMAND, *options, str(FOLDER / "ddp_digits.py"), "200"]
    job = mpirun.start(command, 2, cwd=tmp_path)
    job.wait_for("2 workers on 1 host", stream="stderr")
    with Driver(file) as driver:
        pids = driver.ask("dict(client.run(lambda dask_worker: (dask_worker.name, os.getpid())).values())")
    until((tmp_path / "digits.pt").exists, 60)
    os.kill(pids["1"], signal.SIGKILL)
    done = job.wait(110).check()
    # or Gloo fails in rank 0 before the cluster misses worker 1
    first = r"^spmd: rank (1 \(worker 1 on .*\) died while the gang ran|0 .* raised RuntimeError.*); starting again$"
    assert len(re.findall(first, done.stdout, re.M)) == 1, done.stdout
    assert len(continued(done.stdout, 200)) == 1
    assert len(right(done.stdout)) == 1


@pytest.mark.slow
def test_training_continues_after_the_walltime(mpirun: Mpi, tmp_path: Path) -> None:
    skip_without(*EXAMPLES["ddp_digits"].packages)
    command = [*COMMAND, "--no-dashboard", str(FOLDER / "ddp_digits.py"), "200"]
    job = mpirun.start(command, 2, cwd=tmp_path)
    until((tmp_path / "digits.pt").exists, 60)
    os.kill(ranks_of(job)[0], signal.SIGTERM)
    done = job.wait(30).check(75)
    assert "time is up: the next job continues\n" in done.stdout
    done = mpirun.run(command, 2, cwd=tmp_path, timeout=80).check()
    assert len(continued(done.stdout, 200)) == 1
    assert len(right(done.stdout)) == 1


def continued(output: str, epochs: int) -> set[int]:
    """After which epoch the two ranks continued, of a training that had begun and not ended."""
    found = {int(epoch) for epoch in re.findall(r"rank [01] of 2 continues after epoch (\d+)", output)}
    assert all(0 < epoch < epochs for epoch in found), found
    return found


MIGRATION = FOLDER / "migration"


@pytest.mark.parametrize("when", ["before", "after"])
def test_from_dask_mpi(mpirun: Mpi, when: str) -> None:
    skip_without("dask_mpi")
    done = mpirun.run(["python", str(MIGRATION / f"{when}_dask_mpi.py")], 3).check()
    assert right(done.stdout) == right(sections()["migration/squares.py"])


@pytest.mark.slow
def test_from_slurmrunner(mpirun: Mpi, tmp_path: Path) -> None:
    skip_without("dask_jobqueue")
    tasks = [{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"} for rank in range(3)]
    program = ["python", str(MIGRATION / "before_slurmrunner.py")]
    done = mpirun.run(program, 3, per_rank_env=tasks, cwd=tmp_path).check()
    assert right(done.stdout) == right(sections()["migration/squares.py"])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_from_dask_cuda_worker(mpirun: Mpi, tmp_path: Path, when: str) -> None:
    skip_without("dask_cuda")
    env = gpu_environ(make_gpus(2, host="one", memory=80 * GIB))
    env["PATH"] = f"{mpirun.mpirun.parent}:{os.environ['PATH']}"
    if when == "before":
        program, ranks = ["bash", str(MIGRATION / "before_dask_cuda_worker.sh")], None
    else:
        program, ranks = [*COMMAND, "--no-dashboard", str(MIGRATION / "squares.py")], 1
    done = mpirun.run(program, ranks, env=env, cwd=tmp_path, timeout=90).check()
    assert right(done.stdout) == right(sections()["migration/squares.py"])
