"""What follows exit code 75, by batch system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dask_gpu_mpi.sites import batch, pbs
from dask_gpu_mpi.sites.batch import Allocation, Requeue
from dask_gpu_mpi.sites.pbs import job_script, resources
from support import ROOT

QSTAT = """Job Id: 42.server
    Job_Name = dask-gpu-mpi
    Account_Name = mine
    Resource_List.ncpus = 128
    Resource_List.place = scatter:excl
    Resource_List.select = 2:ncpus=64:mpiprocs=1:ngpus=4
    Resource_List.walltime = 01:00:00
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What would be run, in place of `run_command`; each ends with `rc`."""

    def run(command: Sequence[str], *_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        answer = made.described if command[0] == "qstat" else ""
        return subprocess.CompletedProcess(list(command), made.rc, answer, "denied\n")

    monkeypatch.setattr(batch, "run_command", made := Mock(side_effect=run, rc=0, described=QSTAT))
    return made


def ran(commands: Mock) -> list[str]:
    return [" ".join(call.args[0]) for call in commands.call_args_list]


def requeue(system: str, environ: Mapping[str, str], *, limit: int = 10, logs: str = "") -> int | None:
    job = Requeue(Allocation(system, 2, 2, job="42"), limit, logs)
    return job.allocation.batch.requeue(job, environ)


def test_slurm(commands: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    assert requeue("slurm", {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "9"}) is None
    array = {"SLURM_JOB_ID": "42", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    assert requeue("slurm", array) is None
    assert requeue("slurm", {"SLURM_RESTART_COUNT": "10"}) == 75
    assert ran(commands) == ["scontrol requeue 42", "scontrol requeue 40_3"]
    assert "not requeued: 10 restarts so far (--requeue 10)" in capsys.readouterr().err
    commands.rc = 1
    assert requeue("slurm", {}) == 75
    assert "not requeued: scontrol requeue exited with code 1: denied" in capsys.readouterr().err


def test_pbs_submits_a_job_of_the_same_shape(
    commands: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pbs, "job_script", lambda parent: "/spool/42.SC")
    environ = {
        "PBS_O_QUEUE": "batch",
        "DGM_RESTART": "3",
        "DGM_PROGRAM": "my.py a,b",
        "DASK_X": "1",
        "OTHER": "1",
    }
    assert requeue("pbs", environ) is None
    shape = "-lplace=scatter:excl -lselect=2:ncpus=64:mpiprocs=1:ngpus=4 -lwalltime=01:00:00 -Amine"
    expected = f"qsub -q batch {shape} -Ndask-gpu-mpi -v DASK_X,DGM_PROGRAM,DGM_RESTART /spool/42.SC"
    assert ran(commands) == ["qstat -fw 42", expected]
    assert commands.call_args.args[1]["DGM_RESTART"] == "4"
    assert commands.call_args.kwargs["cwd"] == "."  # qsub makes it the PBS_O_WORKDIR of the new job
    # one task of an array, with the user's name and variables, and another log
    commands.described = (
        QSTAT.replace("= dask-gpu-mpi", "= mine")
        + "    Join_Path = oe\n    Output_Path = h1:/home/me/my.log\n    array_index = 3\n"
        "    Variable_List = PBS_O_HOME=/home/me,A=b c,B=x\\,y,GONE=1,DGM_X=1,PBS_O_HOST=h1\n"
    )
    task = {"PBS_ARRAY_INDEX": "3", "A": "b c", "B": "x,y", "DGM_X": "1", "DGM_PBS_CPUS": "2", "C": "no"}
    assert requeue("pbs", task) is None
    words = ran(commands)[-1].partition(" -N")[2]
    assert words == "mine -joe -oh1:/home/me/my.log.restart1 -J 3-4:2 -v A,B,DGM_RESTART,DGM_X /spool/42.SC"
    # refused
    commands.reset_mock(side_effect=False)
    assert requeue("pbs", environ, limit=3) is None
    assert "3 restarts so far" in capsys.readouterr().err
    monkeypatch.setattr(pbs, "job_script", lambda parent: "")
    assert requeue("pbs", environ) is None
    assert "the job script was not found" in capsys.readouterr().err
    assert ran(commands) == []


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("h1:/home/me/mine.o42", []),
        ("h1:/home/me/mine.o42.3", []),
        ("h1:/home/me/logs/", []),
        ("h1:/tmp", []),
        ("h1:/home/me/a.log", ["-oh1:/home/me/a.log.restart2"]),
        ("h1:/home/me/a.log.restart1", ["-oh1:/home/me/a.log.restart2"]),
        ("", []),
    ],
)
def test_log_that_pbs_would_overwrite(log: str, expected: list[str]) -> None:
    assert resources(f"    Output_Path = {log}\n", 2) == expected


def test_tmrsh_has_the_command_line_of_ssh(tmp_path: Path) -> None:
    """Open MPI has options and one word, Hydra -x and several words."""
    assert os.access(pbs.TMRSH, os.X_OK)
    (tmp_path / "pbs_tmrsh").write_text('#!/bin/sh\nprintf "%s|" "$@"; shift; exec "$@"\n')
    (tmp_path / "pbs_tmrsh").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for words in (["-x", "-o", "A=b", "h2", "echo 'a  b'"], ["-x", "h2", "echo", "'a  b'"]):
        done = subprocess.run([pbs.TMRSH, *words], env=env, capture_output=True, text=True)
        assert done.stdout == "h2|/bin/sh|-c|echo 'a  b'|a  b\n"


@pytest.mark.parametrize(("system", "code"), [("lsf", None), ("sge", 99)])
def test_systems_that_requeue_by_an_exit_code(tmp_path: Path, system: str, code: int | None) -> None:
    """Without limit: a file counts."""
    logs = str(tmp_path / "logs")
    assert [requeue(system, {}, limit=2, logs=logs) for _ in range(3)] == [code, code, 1]
    (tmp_path / "file").touch()
    assert requeue(system, {}, logs=str(tmp_path / "file")) == 1


@pytest.mark.parametrize(("system", "name"), [("flux", "Flux"), ("local", "this machine")])
def test_nobody_to_requeue(system: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert requeue(system, {}) is None
    assert f"not requeued: {name} requeues no job" in capsys.readouterr().err


def test_job_script_is_the_nearest_shells(tmp_path: Path) -> None:
    ask = "import os; from dask_gpu_mpi.sites.pbs import job_script; print(job_script(os.getppid()))"
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\ntimeout 20 nice "$1" -c "$2"\n"$1" -c "$2"\ntrue\n')
    script.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for shell in (["bash"], []):  # or by its first line
        words = [*shell, str(script), sys.executable, ask]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)
        assert done.stdout == f"{script}\n" * 2, done.stderr
    # no program that is no shell, as a Python program that starts `launch`
    (tmp_path / "driver.py").write_text("import time; time.sleep(60)")
    with subprocess.Popen([sys.executable, str(tmp_path / "driver.py")]) as driver:
        assert job_script(driver.pid) != str(tmp_path / "driver.py")
        driver.kill()
    assert job_script(1) == ""
    assert job_script(0) == ""


def test_count_of_lsf_follows_no_strangers_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], links_are_strangers: Callable[[], None]
) -> None:
    (tmp_path / "42.restarts").symlink_to("precious")
    links_are_strangers()
    assert requeue("lsf", {}, logs=str(tmp_path)) == 1
    assert "belongs to another user" in capsys.readouterr().err
    assert not (tmp_path / "precious").exists()
