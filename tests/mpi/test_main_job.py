"""The main job on CPUs: a script, by the command and by `initialize()`, with every class of workers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, facts, scratch_of, workers_of
from support.jobs.mpi import CompletedJob, Mpi
from support.jobs.scripts import script

CORES = len(os.sched_getaffinity(0))

#: No main guard; tasks from everywhere: a function and a class of __main__, a module beside the script, mpi4py.
SCRIPT = script("mpi/scripts/tells_all.py")

BESIDE = """
from distributed import Nanny, Worker

def triple(x):
    return 3 * x

class MyNanny(Nanny):
    pass

class MyWorker(Worker):
    pass
"""


def write_script(folder: Path, before: str = "", after: str = "") -> Path:
    """The script and the module beside it, in a folder of their own that is no working directory."""
    (folder / "beside.py").write_text(BESIDE)
    script = folder / "analysis.py"
    script.write_text(before + SCRIPT + after)
    return script


def run(
    mpirun: Mpi, argv: Sequence[str], ranks: int | None, rc: int = 0, **how: Any
) -> tuple[dict[str, Any], CompletedJob]:
    """What `SCRIPT` tells, and its job, of which all holds that holds for every such job."""
    done = mpirun.run(argv, ranks, **how).check(rc)
    told = facts(done)
    assert done.left == () if rc else done.clean()
    assert done.stdout.count("the script runs") == 1
    assert told["name"] == "__main__"
    assert told["doubled"] == [2 * x for x in range(10)]
    assert told["beside"] == 15
    assert told["pair"] == {"type": "Pair", "left": 3, "made here": False}
    # the script's process is no MPI process of the job, and those of the workers are none
    assert told["world"] == [1, 5]
    assert told["worlds"] == [[1, 5]] * len(told["workers"])
    plan = told["plan"]
    assert plan["world_size"] == (ranks or 1)
    assert plan["client"]["rank"] == told["rank"]
    rows = workers_of(told)
    assert sorted(rows) == sorted(str(worker["name"]) for worker in plan["workers"])
    for worker in plan["workers"]:
        row = rows[str(worker["name"])]
        assert row["nthreads"] == worker["nthreads"]
        assert row["identity"] == []
    assert sum(row["memory"] for row in rows.values()) <= sum(host["memory"] for host in plan["hosts"])
    assert len({row["pid"] for row in rows.values()}) == len(rows)
    return told, done


@pytest.mark.both_mpis
@pytest.mark.quick
def test_command(mpirun: Mpi, tmp_path: Path) -> None:
    # forked children, which would hold the agent's lifeline open until the shutdown deadline, and a code of its own
    forks = "import multiprocessing as mp\npool = mp.get_context('fork').Pool(2)\ntell(forked=pool.map(abs, [-3]))\n"
    script = write_script(tmp_path, after=forks + "sys.exit(7)\n")
    told, done = run(mpirun, [*COMMAND, str(script), "--nthreads", "two words"], 2, 7)
    assert told["rank"] == 0
    assert told["forked"] == [3]
    assert "did not answer" not in done.stderr
    assert told["argv"] == [str(script), "--nthreads", "two words"]
    assert told["file"] == str(script)
    assert told["address"].startswith("tls://127.0.0.1:")
    assert [row["name"] for row in told["workers"]] == [0, 1]  # ints, as in dask-mpi
    assert all(row["nanny"] for row in told["workers"]), told["workers"]
    assert {row["nthreads"] for row in told["workers"]} == {max(1, CORES // 2)}
    assert "Traceback" not in done.stderr
    # The plan that was made for this job is the plan that `plan` shows.
    alone = mpirun.run([*COMMAND, "plan", "--json"], 2).check()
    assert json.loads(alone.stdout) == told["plan"]


@pytest.mark.versions(kind="module")
@pytest.mark.parametrize("kind", ["module", "code", "folder"])
def test_command_with_what_python_runs(mpirun: Mpi, tmp_path: Path, kind: str) -> None:
    """Functions and classes of ``__main__`` reach the workers, whose import path has what the program's has."""
    script = write_script(tmp_path)
    program, beside = [str(tmp_path)], str(tmp_path / "__main__.py")
    if kind == "folder":
        script.rename(beside)
    elif kind == "module":
        program, beside = ["-m", "analysis"], str(script)
    else:
        program, beside = ["-c", "__file__ = 'none'\n" + SCRIPT], "none"
    line = [*COMMAND, "--no-dashboard", *program, "--nthreads", "3"]
    told, _ = run(mpirun, line, 2, cwd=tmp_path)
    assert told["argv"] == [{"code": "-c", "module": str(script)}.get(kind, program[0]), "--nthreads", "3"]
    assert told["file"] == beside


def test_initialize_with_one_rank_and_a_nanny(mpirun: Mpi, tmp_path: Path) -> None:
    before = """
import dask, distributed
from dask_gpu_mpi import initialize
dask.config.set({"probe": {"deep": "from the script"}, "distributed.worker.memory.spill": 0.55})
session = initialize(worker_class=distributed.Nanny)
assert session
"""
    after = """
spill = client.run(lambda: __import__("dask").config.get("distributed.worker.memory.spill"))
tell(spill=list(spill.values()), session=repr(session), other=session.client().submit(double, 21).result())
"""
    told, _ = run(mpirun, ["python", str(write_script(tmp_path, before, after)), "a b"], 1)
    assert told["argv"][1:] == ["a b"]
    assert [row["name"] for row in told["workers"]] == [0]
    assert told["workers"][0]["nthreads"] == CORES
    assert told["workers"][0]["config"] == {"deep": "from the script"}
    assert told["spill"] == [0.55]
    assert told["other"] == 42
    assert told["session"].startswith(f"<Session {told['address']} workers=1 hosts=1")
    # FAILS: the scheduler's process leaves an empty dask-scratch-space in the temporary directory
    assert scratch_of(mpirun.jobs[-1], "d*") == []


@pytest.mark.both_mpis
@pytest.mark.quick
def test_initialize_with_two_ranks_and_workers_in_the_agents(mpirun: Mpi, tmp_path: Path) -> None:
    before = "from dask_gpu_mpi import initialize\ninitialize(worker_class='distributed.Worker')\n"
    after = "raise ValueError('of the script')\n"
    told, done = run(mpirun, ["python", str(write_script(tmp_path, before, after))], 2, 1)
    assert not any(row["nanny"] for row in told["workers"]), told["workers"]
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: of the script") == 1


@pytest.mark.quick
def test_command_without_a_launcher_and_a_class_beside_the_script(mpirun: Mpi, tmp_path: Path) -> None:
    script = write_script(tmp_path, after="raise ValueError('of the script')\n")
    line = [*COMMAND, "--worker-class", "beside.MyNanny", "--nthreads", "3", str(script)]
    told, done = run(mpirun, line, None, 1)
    assert told["workers"][0]["nthreads"] == 3
    first, *trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert first.startswith("Traceback")
    assert trace[0].strip().startswith(f'File "{script}"')  # the user's frames alone
    assert sum("ValueError: of the script" in line for line in trace) == 1


def test_exclusive_layout_and_a_class_of_the_script(mpirun: Mpi, tmp_path: Path) -> None:
    before = """
from dask_gpu_mpi import initialize
from distributed import Worker

class Mine(Worker):
    pass

initialize(layout="exclusive", worker_class=Mine, worker_options={"resources": {"own": 2}}, startup_timeout=20)
"""
    after = """
tell(own=client.submit(double, 8, resources={"own": 1}).result())
"""
    # FAILS: the frame "workers" carries the class by reference (pickle), which the agent can't load, and does not report
    told, _ = run(mpirun, ["python", str(write_script(tmp_path, before, after))], 3)
    assert (told["plan"]["scheduler"]["rank"], told["rank"]) == (0, 1)
    assert [(row["name"], row["class"]) for row in told["workers"]] == [(2, "Mine")]
    assert told["own"] == 16


def test_roles_and_the_order_of_options(mpirun: Mpi, tmp_path: Path) -> None:
    # command line > environment > Dask's YAML > default
    config = tmp_path / "config"
    config.mkdir()
    section = {"nthreads": 3, "memory-limit": "300MB", "name": "yaml", "client-rank": 2}
    (config / "dask.yaml").write_text(json.dumps({"gpu-mpi": section, "probe": "from the file"}))
    env = {
        "DASK_CONFIG": str(config),
        "DASK_GPU_MPI__NTHREADS": "2",
        "DASK_GPU_MPI__NAME": "environment",
        "DASK_GPU_MPI__CLIENT_RANK": "1",
        "DASK_GPU_MPI__SUMMARY": "true",
    }
    line = [*COMMAND, "--name", "said", "--scheduler-rank", "2", str(write_script(tmp_path))]
    told, done = run(mpirun, line, 3, env=env)
    assert told["rank"] == 1
    assert told["plan"]["scheduler"]["rank"] == 2
    assert [row["name"] for row in told["workers"]] == [f"said-{rank}" for rank in range(3)]
    assert {row["nthreads"] for row in told["workers"]} == {2}
    assert {row["memory"] for row in told["workers"]} == {300_000_000}
    assert {row["config"] for row in told["workers"]} == {"from the file"}
    # which needs no report
    assert "dask_gpu_mpi: summary: mean of 3 CPU workers, " in done.stderr
