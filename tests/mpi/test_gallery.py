"""Each example of the gallery, by one real job; on emulated GPUs where these make a difference."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import ROOT
from support.jobs.clusters import COMMAND, Driver, ranks_of, until, up
from support.jobs.gallery import EXAMPLES, right, sections, skip_without
from support.jobs.mpi import CompletedJob, Mpi
from support.mocks.gpus import GIB, make_gpus

FOLDER = ROOT / "examples"
GPUS = make_gpus(2, host="one", memory=80 * GIB)


def line(name: str, *words: str, options: Sequence[str] = ()) -> list[str]:
    """The command line of an example; its options precede its name, the words follow it."""
    skip_without(*EXAMPLES[name].packages)
    return [*COMMAND, "--no-dashboard", *options, str(FOLDER / f"{name}.py"), *words]


def is_right(done: CompletedJob, name: str) -> None:
    """The answer is that of the page."""
    assert right(done.check().stdout) == right(sections()[f"{name}.py"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(mpirun: Mpi, tmp_path: Path, name: str) -> None:
    is_right(mpirun.run(line(name, options=EXAMPLES[name].options), 2, cwd=tmp_path), name)


@pytest.mark.parametrize("options", [EXAMPLES["cpu_and_gpu"].options, ()], ids=["all", "none"])
def test_cpu_workers_beside_gpus(mpirun: Mpi, options: tuple[str, ...]) -> None:
    done = mpirun.run(line("cpu_and_gpu", options=options), 2, gpus=GPUS)
    is_right(done, "cpu_and_gpu")
    if options:
        assert "loaded by ['0-cpu-0'], computed by ['0-0', '1-1']\n" in done.stdout
    else:
        assert "no CPU workers: the GPU workers have loaded as well. Fix: --cpu-workers 1\n" in done.stderr


@pytest.mark.slow
def test_a_trial_for_each_gpu(mpirun: Mpi, tmp_path: Path) -> None:
    command = line("hyperparameters", options=["--cpu-workers", "1"])
    done = mpirun.run(command, 2, gpus=GPUS, cwd=tmp_path).check()
    lines = [line for line in done.stdout.splitlines() if "on worker" in line]
    assert len(lines) == 9
    assert all(line.endswith(("on worker 0-0", "on worker 1-1")) for line in lines), lines


@pytest.mark.slow
def test_interactive(mpirun: Mpi, tmp_path: Path) -> None:
    """A cluster, a process beside it, and a second job."""
    file = tmp_path / "cluster.json"
    first = up(mpirun, file, 2, "--no-dashboard")
    words = f"{file} --grow-to 3 --timeout 60 --shutdown".split()
    notebook = mpirun.start(["python", str(FOLDER / "interactive.py"), *words], None)
    notebook.wait_for("waiting for 3 workers")
    second = up(mpirun, file, 1, "--no-scheduler")
    is_right(notebook.wait(), "interactive")
    first.wait().check()
    second.wait().check()


@pytest.mark.slow
def test_training_continues_after_a_worker_was_killed(mpirun: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    command = line("ddp_digits", "200", options=["--scheduler-file", str(file)])
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
    command = line("ddp_digits", "200")
    job = mpirun.start(command, 2, cwd=tmp_path)
    until((tmp_path / "digits.pt").exists, 60)
    os.kill(ranks_of(job)[0], signal.SIGTERM)
    done = job.wait().check(75)
    assert "time is up: the next job continues\n" in done.stdout
    done = mpirun.run(command, 2, cwd=tmp_path).check()
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
    is_right(mpirun.run(["python", str(MIGRATION / f"{when}_dask_mpi.py")], 3), "migration/squares")


@pytest.mark.slow
def test_from_slurmrunner(mpirun: Mpi, tmp_path: Path) -> None:
    skip_without("dask_jobqueue")
    tasks = [{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"} for rank in range(3)]
    program = ["python", str(MIGRATION / "before_slurmrunner.py")]
    is_right(mpirun.run(program, 3, per_rank_env=tasks, cwd=tmp_path), "migration/squares")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_from_dask_cuda_worker(mpirun: Mpi, tmp_path: Path, when: str) -> None:
    skip_without("dask_cuda")
    env = {"PATH": f"{mpirun.mpirun.parent}:{os.environ['PATH']}"}
    program, ranks = line("migration/squares"), 1
    if when == "before":
        program, ranks = ["bash", str(MIGRATION / "before_dask_cuda_worker.sh")], None
    is_right(mpirun.run(program, ranks, gpus=GPUS, env=env, cwd=tmp_path), "migration/squares")
