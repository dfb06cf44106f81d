"""The job scripts as they are, under bash with stand-ins for launchers and batch systems."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dask_gpu_mpi.sites.batch import batch_system
from dask_gpu_mpi.sites.command import START
from dask_gpu_mpi.sites.jobscript import SCRIPTED, template
from support import ROOT
from support.mocks.batch import ENVIRON, FakeBatch, Ran

TEMPLATES = sorted((ROOT / "jobscripts").iterdir())


def system_of(path: Path) -> str:
    return next(system for system in SCRIPTED if path.name in batch_system(system).templates.values())


def run_template(batch: FakeBatch, name: str, *args: str, **env: str) -> Ran:
    path = ROOT / "jobscripts" / name
    return batch.run(path, args, {**ENVIRON[system_of(path)], **env})


# --- the templates as they are


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_template_is_a_short_script(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert len(lines) <= 30
    assert sum("dask-gpu-mpi launch " in line for line in lines) == 1
    assert max(map(len, lines)) <= 130
    assert path.name in lines[2]
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_template_has_its_launcher_and_is_in_the_package() -> None:
    assert {path.name for path in TEMPLATES} == {
        name for system in SCRIPTED for name in batch_system(system).templates.values()
    }
    for path in TEMPLATES:
        assert template(path.name) == path.read_text()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_template_runs_check_and_then_the_script(batch: FakeBatch, path: Path) -> None:
    words = ("my.py", "a b", "--lr=3")
    ran = batch.run(path, words, ENVIRON[system_of(path)])
    assert ran.rc == 0, ran.output
    assert ran.program() == list(words)
    ours = ran.started()
    assert [line[0] for line in ours] == ["check", "run"]
    # the preflight is told what the job is: options before the script are the job's
    assert ours[0] == ["check", *words]
    # the first one is refused: nothing is run
    batch.answers["start"] = ("", 1)
    ran = batch.run(path, words, ENVIRON[system_of(path)])
    assert (ran.rc, ran.program()) == (1, None)
    # without the first one, the script's own exit code is the job's
    batch.answers["start"] = ("", 7)
    ran = batch.run(path, words, {**ENVIRON[system_of(path)], "DGM_CHECK": "no"})
    assert (ran.rc, ran.program()) == (7, list(words))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_template_without_a_script_says_how_to_use_it(batch: FakeBatch, path: Path) -> None:
    ran = batch.run(path, (), ENVIRON[system_of(path)])
    assert ran.rc == 2
    assert ran.output.startswith("usage: ")
    assert path.name in ran.output
    assert ran.rows == []


@pytest.mark.parametrize("name", ["pbs.pbs", "pbs-pals.pbs", "lsf.bsub"])
def test_script_and_arguments_from_the_environment(batch: FakeBatch, name: str) -> None:
    ran = run_template(batch, name, DGM_PROGRAM="my.py *  $(touch gone) --lr=3")
    assert ran.program() == ["my.py", "*", "$(touch", "gone)", "--lr=3"]
    assert not (batch.directory / "gone").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_setup_file_and_container(batch: FakeBatch, path: Path) -> None:
    (batch.directory / "my setup").write_text("export SEEN=$# MINE=yes\n")
    (batch.directory / "im age.sif").touch()
    env = {"DGM_SETUP": "./my setup", "DGM_CONTAINER": "im age.sif", **ENVIRON[system_of(path)]}
    ran = batch.run(path, ("my.py",), env)
    assert ran.rc == 0, ran.output
    last = [row for row in ran.rows if row["name"] == "python"][-1]
    # conda's activate would take the script's arguments for its own
    assert (last["env"]["SEEN"], last["env"]["MINE"]) == ("0", "yes")
    binds = [f"--bind={path}:{path}" for path in (batch.directory, batch.directory / "logs")]
    assert ran.of("apptainer")[-1][:6] == ["exec", "--nv", *binds, "im age.sif", "python"]
    env["DGM_SETUP"] = "gone"
    ran = batch.run(path, ("my.py",), env)
    assert (ran.rc, ran.program()) == (2, None)
    assert "DGM_SETUP: gone is no file that can be read" in ran.output


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_setup_file_leaves_the_options_of_the_shell(batch: FakeBatch, path: Path) -> None:
    (batch.bin / "env.sh").write_text("exit 9\n")  # without a slash, source would find this one
    (batch.directory / "env.sh").write_text("set -euo pipefail\nexport MINE=yes\n")
    env = {"DGM_SETUP": "env.sh", "DGM_CHECK": "no", **ENVIRON[system_of(path)]}
    batch.answers |= {"start": ("", 75), "squeue": ("N/A", 0)}
    ran = batch.run(path, ("my.py",), env)
    assert ran.rc == 75, ran.output
    assert next(row for row in ran.rows if row["argv"][1:3] == [START, "run"])["env"]["MINE"] == "yes"
    after = {"slurm": "scontrol", "pbs": "qsub"}.get(system_of(path))
    assert after is None or len(ran.of(after)) == 1
    # the last command of a file may well fail, as in `[[ -d X ]] && module use X`
    (batch.directory / "env.sh").write_text("export MINE=yes\nfalse\n")
    assert batch.run(path, ("my.py",), env).program() == ["my.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-mpirun.sbatch"])
def test_slurm_requeues_after_a_checkpoint(batch: FakeBatch, name: str) -> None:
    batch.answers["start"] = ("", 75)
    ran = run_template(batch, name, "my.py", DGM_CHECK="no")
    assert (ran.rc, ran.of("scontrol")) == (75, [["requeue", "42"]])
    # 2030-01-02T03:04:05
    (job,) = [row for row in ran.rows if row["name"] == "python" and "run" in row["argv"]]
    assert job["env"]["SLURM_JOB_END_TIME"] == "1893553445"
    ran = run_template(batch, name, "my.py", DGM_CHECK="no", SLURM_RESTART_COUNT="10")
    assert (ran.rc, ran.of("scontrol")) == (75, [])
    batch.answers |= {"start": ("", 3), "squeue": ("N/A", 0)}
    ran = run_template(batch, name, "my.py", DGM_CHECK="no")
    assert (ran.rc, ran.of("scontrol")) == (3, [])
    assert "SLURM_JOB_END_TIME" not in ran.rows[-1]["env"]


SIGNALS = {
    "slurm.sbatch": "##SBATCH --signal=USR1@120",
    "slurm-mpirun.sbatch": "##SBATCH --signal=B:USR1@120",
    "lsf.bsub": "##BSUB -wa USR1 -wt 2",
    "flux.sh": '# program=(--launcher-option=--signal=USR1@120 "${program[@]}")  # a signal to all ranks before the walltime',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_walltime_signal_is_an_example_that_works(batch: FakeBatch, name: str) -> None:
    text = (ROOT / "jobscripts" / name).read_text()
    assert text.splitlines().count(SIGNALS[name]) == 1
    (batch.directory / name).write_text(text.replace(SIGNALS[name], SIGNALS[name][1:].lstrip()))
    ran = batch.run(batch.directory / name, ("my.py",), ENVIRON[system_of(ROOT / "jobscripts" / name)])
    assert ran.rc == 0, ran.output
    assert name != "flux.sh" or "--signal=USR1@120" in ran.launched("flux")
    said = run_template(batch, name, "my.py", DASK_GPU_MPI__WALLTIME_SIGNAL="USR2")
    # what session.on_walltime listens to
    for done, signal in ((ran, "USR1"), (said, "USR2")):
        last = [row["env"] for row in done.rows if row["name"] == "python"][-1]
        assert last["DASK_GPU_MPI__WALLTIME_SIGNAL"] == signal


QSTAT = """Job Id: 42.server
    Job_Name = dask-gpu-mpi
    Account_Name = abc
    Resource_List.ncpus = 128
    Resource_List.ngpus = 8
    Resource_List.place = scatter:excl
    Resource_List.select = 2:ncpus=64:mpiprocs=1:ngpus=4
    Resource_List.walltime = 02:00:00
    Submit_arguments = -v DGM_PROGRAM=my.py pbs.pbs
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pbs.pbs", "pbs-pals.pbs"])
def test_pbs_submits_a_job_like_this_one_after_a_checkpoint(batch: FakeBatch, name: str) -> None:
    batch.answers |= {"start": ("", 75), "qstat": (QSTAT, 0)}
    env = {"DGM_CHECK": "no", "DGM_PROGRAM": "my.py a,b", "DASK_GPU_MPI__LAYOUT": "shared"}
    ran = run_template(batch, name, **env)
    assert ran.rc == 75
    (argv,) = ran.of("qsub")
    assert argv[:2] == ["-q", "batch"]
    assert sorted(argv[2:6]) == [
        *("-Aabc", "-lplace=scatter:excl", "-lselect=2:ncpus=64:mpiprocs=1:ngpus=4"),
        "-lwalltime=02:00:00",
    ]
    assert argv[6] == "-v"
    # names alone: qsub takes their values, which may hold commas, from its environment
    names = ["DASK_GPU_MPI__LAYOUT", "DGM_CHECK", "DGM_PROGRAM", "DGM_RESTART"]
    assert sorted(argv[7].split(",")) == names
    assert argv[8] == str(ROOT / "jobscripts" / name)
    environ = next(row["env"] for row in ran.rows if row["name"] == "qsub")
    assert (environ["DGM_RESTART"], environ["DGM_PROGRAM"]) == ("1", "my.py a,b")
    # PBS has no variable that counts restarts: this is ours
    ran = run_template(batch, name, **env, DGM_RESTART="10")
    assert (ran.rc, ran.of("qsub")) == (75, [])
