"""The job scripts as they are, under bash with stand-ins for launchers and batch systems."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.sites.jobscript import SCRIPTED, format_of, template
from support import ROOT
from support.mocks.batch import ENVIRON, MPICH, FakeBatch, Ran

TEMPLATES = sorted((ROOT / "jobscripts").iterdir())
each_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)


def system_of(path: Path) -> str:
    return next(system for system in SCRIPTED if path.name in format_of(system).templates.values())


def run_template(batch: FakeBatch, name: str, *args: str, **env: str) -> Ran:
    path = ROOT / "jobscripts" / name
    return batch.run(path, args, {**ENVIRON[system_of(path)], **env})


def test_every_template_has_its_launcher_and_is_in_the_package() -> None:
    assert {path.name for path in TEMPLATES} == {
        name for system in SCRIPTED for name in format_of(system).templates.values()
    }
    for path in TEMPLATES:
        assert template(path.name) == path.read_text()


@each_template
def test_template_runs_check_and_then_the_script(batch: FakeBatch, path: Path) -> None:
    words = ["my.py", "a b", "--lr=3"]
    if path.name == "pbs-pals.pbs":  # it starts ranks of MPICH
        batch.answers |= {"mpiexec --version": ("mpiexec version 1.2.12", 0), "python -m mpi4py": (MPICH, 0)}
    ran = batch.run(path, words, ENVIRON[system_of(path)])
    assert ran.rc == 0, ran.output
    # the preflight is told what the job is: options before the script are the job's
    check, run = ran.started()
    assert check == ["check", *words]
    assert run[0] == "run"
    assert ran.program() == words


@pytest.mark.parametrize(("check", "program"), [("", None), ("no", ["my.py"])])
def test_refused_preflight_and_none(batch: FakeBatch, check: str, program: list[str] | None) -> None:
    batch.answers["start"] = ("", 7)
    ran = run_template(batch, "lsf.bsub", "my.py", DGM_CHECK=check)
    assert (ran.rc, ran.program()) == (7, program)


@each_template
def test_template_without_a_script_says_how_to_use_it(batch: FakeBatch, path: Path) -> None:
    ran = batch.run(path, (), ENVIRON[system_of(path)])
    assert ran.rc == 2
    assert ran.output.startswith("usage: ")
    assert path.name in ran.output
    assert ran.rows == []


@each_template
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM], ids=lambda each: each.name
)
def test_signal_to_all_processes_of_the_job(tmp_path: Path, path: Path, number: signal.Signals) -> None:
    """As of qsig, and at the end of the walltime: `launch` ends with the code of the job, and a shell that waits for it too."""
    fake = tmp_path / "dask-gpu-mpi"
    fake.write_text(
        f"#!{sys.executable}\nimport signal, sys\nnumber = {number:d}\n"
        "assert signal.getsignal(number) is signal.SIG_DFL\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {number})\nprint('ready', flush=True)\n"
        "signal.sigwait({number})\nsys.exit(75)\n"
    )
    fake.chmod(0o755)
    env = {**os.environ, **ENVIRON[system_of(path)], "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["PBS_O_WORKDIR"] = str(tmp_path)
    line = ["bash", str(path), "my.py"]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        os.killpg(job.pid, number)
        assert job.wait(20) == 75


@pytest.mark.parametrize("name", ["pbs.pbs", "pbs-pals.pbs", "lsf.bsub"])
def test_script_and_arguments_from_the_environment(batch: FakeBatch, name: str) -> None:
    batch.mock_launch()
    ran = run_template(batch, name, DGM_PROGRAM="my.py *  $(touch gone) --lr=3")
    (words,) = ran.of("dask-gpu-mpi")
    assert words[-5:] == ["my.py", "*", "$(touch", "gone)", "--lr=3"]
    assert not (batch.directory / "gone").exists()


@each_template
def test_setup_file(batch: FakeBatch, path: Path) -> None:
    batch.mock_launch()
    batch.answers["dask-gpu-mpi"] = ("", 75)
    (batch.bin / "env.sh").write_text("exit 9\n")  # without a slash, source would find this one
    env = {"DGM_SETUP": "env.sh", **ENVIRON[system_of(path)]}
    # it may set any option of the shell, and its last command may well fail, as in `[[ -d X ]] && module use X`
    for text in ("set -euo pipefail\nexport SEEN=$# MINE=yes\n", "export SEEN=$# MINE=yes\nfalse\n"):
        (batch.directory / "env.sh").write_text(text)
        ran = batch.run(path, ("my.py", "1"), env)
        assert ran.rc == 75, ran.output
        (launch,) = ran.rows
        assert launch["argv"][-2:] == ["my.py", "1"]
        assert ("--requeue" in launch["argv"]) is (path.name != "flux.sh")
        # conda's activate would take the script's arguments for its own
        assert (launch["env"]["SEEN"], launch["env"]["MINE"]) == ("0", "yes")
    ran = batch.run(path, ("my.py",), env | {"DGM_SETUP": "gone"})
    assert (ran.rc, ran.rows) == (2, [])
    assert "DGM_SETUP: gone is no file that can be read" in ran.output


def test_walltime_signal_of_flux_is_an_example_that_works(batch: FakeBatch) -> None:
    """It is a setting, not a directive."""
    text = (ROOT / "jobscripts" / "flux.sh").read_text()
    (batch.directory / "flux.sh").write_text(text.replace("# program=(--launcher", "program=(--launcher"))
    ran = batch.run(batch.directory / "flux.sh", ("my.py",), ENVIRON["flux"])
    assert ran.rc == 0, ran.output
    assert "--signal=USR1@120" in ran.launched("flux")
    # what session.on_walltime listens to
    last = [row["env"] for row in ran.rows if row["name"] == "python"][-1]
    assert last["DASK_GPU_MPI__WALLTIME_SIGNAL"] == "USR1"


@each_template
def test_a_script_that_was_not_submitted(batch: FakeBatch, path: Path) -> None:
    ran = batch.run(path, ("my.py",), {})
    assert ran.rc == 2
    assert re.fullmatch(r"this is no job of \w+\. Fix: submit this script by [\w ]+\n", ran.output)
