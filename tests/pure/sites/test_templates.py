"""The job scripts as they are, under bash with stand-ins for launchers and batch systems."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.sites.batch import batch_system
from dask_gpu_mpi.sites.command import START
from dask_gpu_mpi.sites.jobscript import SCRIPTED, template
from support.mocks.batch import ENVIRON, MPICH, OPEN_MPI, FakeBatch, Ran

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "jobscripts").iterdir())


def system_of(path: Path) -> str:
    return next(system for system in SCRIPTED if path.name in batch_system(system).templates.values())


@pytest.fixture
def batch() -> Iterator[FakeBatch]:
    with tempfile.TemporaryDirectory() as folder:
        made = FakeBatch(Path(folder))
        (made.directory / "nodes").write_text("h1\nh2\n")
        yield made


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
    env = {"DGM_SETUP": "./my setup", "DGM_CONTAINER": "im age.sif", **ENVIRON[system_of(path)]}
    ran = batch.run(path, ("my.py",), env)
    assert ran.rc == 0, ran.output
    last = [row for row in ran.rows if row["name"] == "python"][-1]
    # conda's activate would take the script's arguments for its own
    assert (last["env"]["SEEN"], last["env"]["MINE"]) == ("0", "yes")
    here = f"--bind={batch.directory}"
    assert ran.of("apptainer")[-1][:6] == ["exec", "--nv", here, f"{here}/logs", "im age.sif", "python"]
    env["DGM_SETUP"] = "gone"
    ran = batch.run(path, ("my.py",), env)
    assert (ran.rc, ran.program()) == (2, None)
    assert "DGM_SETUP: gone is no file that can be read" in ran.output


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_container_has_the_directories_of_the_job(batch: FakeBatch, path: Path) -> None:
    site = batch.directory / "site"
    places = {name: site / f"{name} of mine" for name in ("code", "setup", "scratch")}
    for place in places.values():
        place.mkdir(parents=True)
    script = places["code"] / "my.py"
    for file in (script, places["setup"] / "env.sh", site / "data"):
        file.touch()
    env = {
        "DGM_SETUP": str(places["setup"] / "env.sh"),
        "DGM_CONTAINER": "image.sif",
        "DGM_SCRATCH": str(places["scratch"]),
        "DGM_LOGS": str(site / "logs"),
        **ENVIRON[system_of(path)],
    }
    words = ("--layout", "shared", str(script), str(site / "data"))
    ran = batch.run(path, words, env)
    assert ran.rc == 0, ran.output
    assert ran.program() == list(words)
    for argv in ran.of("apptainer")[-2:]:  # check and run
        binds = [word for word in argv if word.startswith("--bind=")]
        assert argv[: len(binds) + 4] == ["exec", "--nv", *binds, "image.sif", "python"]
        expected = [batch.directory, site / "logs", *places.values()]
        assert sorted(binds) == sorted(f"--bind={place}" for place in expected)
    assert ran.rows[-1]["env"]["DASK_GPU_MPI__LOCAL_DIRECTORY"] == str(places["scratch"])
    # below the launchers that take along what they are told to
    if system_of(path) in ("pbs", "lsf") or "mpirun" in path.name:
        started = [argv for argv in ran.of("mpirun") + ran.of("mpiexec") if argv != ["--version"]]
        assert all("DASK_GPU_MPI__LOCAL_DIRECTORY" in argv for argv in started)
        assert started or ran.of("jsrun")


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_scratch_is_left_to_each_host_unless_it_is_said(batch: FakeBatch, path: Path) -> None:
    ran = batch.run(path, ("my.py",), {"TMPDIR": "/local/42", **ENVIRON[system_of(path)]})
    last = [row for row in ran.rows if row["name"] == "python"][-1]
    assert "DASK_GPU_MPI__LOCAL_DIRECTORY" not in last["env"]
    assert last["env"]["TMPDIR"] == "/local/42"
    # made by the workers, on each host: nothing to bind here
    env = {"DGM_SCRATCH": "/local/none", "DGM_CONTAINER": "image.sif"}
    ran = batch.run(path, ("my.py",), {**env, **ENVIRON[system_of(path)]})
    assert ran.rc == 0, ran.output
    assert not any("/local" in word for word in ran.of("apptainer")[-1])
    assert ran.rows[-1]["env"]["DASK_GPU_MPI__LOCAL_DIRECTORY"] == "/local/none"


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_preflight_is_told_how_many_gpus_there_must_be(batch: FakeBatch, path: Path) -> None:
    ran = batch.run(path, ("my.py",), {"DGM_EXPECT_GPUS": "4", **ENVIRON[system_of(path)]})
    ours = ran.started()
    assert ours[0] == ["check", "--expect-gpus=4", "my.py"]
    assert ran.program() == ["my.py"]


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
@pytest.mark.parametrize(
    ("library", "options"),
    [
        (OPEN_MPI, ["--mpi=pmix", "--cpu-bind=none"]),
        (MPICH, ["--mpi=pmi2", "--cpu-bind=none"]),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", ["--mpi=pmi2", "--cpu-bind=none"]),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15", ["--cpu-bind=none"]),
        ("", ["--cpu-bind=none"]),
    ],
)
def test_slurm_meets_the_mpi_library(batch: FakeBatch, library: str, options: list[str]) -> None:
    batch.answers["python -m mpi4py"] = (library, 0)
    always = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=30"]
    assert run_template(batch, "slurm.sbatch", "my.py").launched("srun") == [*options, *always]
    ran = run_template(batch, "slurm.sbatch", "my.py", DGM_MPI="pmix_v4")
    assert ran.launched("srun")[:2] == ["--mpi=pmix_v4", "--cpu-bind=none"]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "options"), [(OPEN_MPI, ["-o", "pmi=pmix"]), (MPICH, [])])
def test_flux_meets_the_mpi_library(batch: FakeBatch, library: str, options: list[str]) -> None:
    batch.answers["python -m mpi4py"] = (library, 0)
    assert run_template(batch, "flux.sh", "my.py", DGM_RANKS_PER_NODE="4").launched("flux") == [
        *(
            "run",
            "--nodes=2",
            "--tasks-per-node=4",
            "--exclusive",
            "-o",
            "cpu-affinity=off",
            "-o",
            "gpu-affinity=off",
        ),
        *options,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("slurm-mpirun.sbatch", ["-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none"]),
        ("pbs.pbs", ["-np", "2", "--host", "h1:1,h2:1", "--map-by", "slot", "--bind-to", "none"]),
        ("lsf.bsub", ["-np", "2", "--host", "h1:1,h2:1", "--map-by", "slot", "--bind-to", "none"]),
    ],
)
def test_open_mpi_is_told_which_variables_to_take_along(
    batch: FakeBatch, name: str, start: list[str]
) -> None:
    (batch.bin / "jsrun").unlink()
    env = {"DASK_GPU_MPI__LAYOUT": "shared", "PYTHONPATH": "/p", "SECRET": "x", "TMPDIR": "/tmp/42"}
    ran = run_template(batch, name, "my.py", **env)
    options = ran.launched("mpirun")
    assert options[: len(start)] == start
    named = options[len(start) :]
    assert set(named[::2]) == {"-x"}
    assert {"PATH", "PYTHONPATH", "DASK_GPU_MPI__LAYOUT"} <= set(named[1::2])
    assert {"TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HOME", "SLURM_JOB_ID"}.isdisjoint(named)
    # `launch` names all that the other launchers take along
    assert "SECRET" in named


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pbs.pbs", "lsf.bsub"])
def test_open_mpi_takes_along_what_the_setup_file_changes(batch: FakeBatch, name: str) -> None:
    (batch.bin / "jsrun").unlink()
    text = "export NEW='a b' MORE=$'c\\nd' OLD=2 PATH=$PATH:/x SAME=1\nPLAIN=1\nf() { :; }; export -f f\n"
    (batch.directory / "env.sh").write_text(text)
    ran = run_template(batch, name, "my.py", DGM_SETUP="env.sh", OLD="1", SAME="1", SECRET="x")
    options = ran.launched("mpirun")
    named = [options[i + 1] for i, word in enumerate(options) if word == "-x"]
    assert {"PATH", "NEW", "MORE", "OLD"} <= set(named)
    assert "PLAIN" not in named
    assert not any("%" in word for word in named), "functions of the shell"
    assert len(named) == len(set(named))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slurm-mpirun.sbatch", ["-n", "2", "-ppn", "1", "-bind-to", "none"]),
        ("pbs.pbs", ["-n", "2", "-hosts", "h1:1,h2:1", "-bind-to", "none"]),
        ("lsf.bsub", ["-n", "2", "-hosts", "h1:1,h2:1", "-bind-to", "none"]),
    ],
)
def test_options_of_hydra(batch: FakeBatch, name: str, options: list[str]) -> None:
    batch.answers["mpiexec --version"] = ("HYDRA build details:\n    Version: 5.0.2", 0)
    batch.answers["python -m mpi4py"] = (MPICH, 0)
    assert run_template(batch, name, "my.py", DGM_LAUNCHER="mpiexec").launched("mpiexec") == options


@pytest.mark.slow
def test_options_of_pals_and_jsrun(batch: FakeBatch) -> None:
    (batch.directory / "nodes").write_text("h1\nh1\nh2\nh2\n")
    batch.answers |= {
        "python -m mpi4py": ("MPI VERSION    : CRAY MPICH version 8.1.28.15", 0),
        "mpiexec --version": ("mpiexec version 1.2.12 revision 1", 0),
    }
    ran = run_template(batch, "pbs-pals.pbs", "my.py", CUDA_VISIBLE_DEVICES="GPU-1,GPU-2")
    assert ran.launched("mpiexec") == ["-n", "4", "--ppn", "2", "--cpu-bind", "none"]
    assert ran.rows[-1]["env"]["MPICH_GPU_SUPPORT_ENABLED"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in ran.rows[-1]["env"]
    ran = run_template(batch, "lsf.bsub", "my.py")
    assert ran.launched("jsrun") == [
        "-n",
        "ALL_HOSTS",
        "-r",
        "1",
        "-a",
        "1",
        "-c",
        "ALL_CPUS",
        "-g",
        "ALL_GPUS",
        "-b",
        "none",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_node", "visible", "on_node"),
    [
        ("2", "0,1", "2"),
        ("a100:2", "0,1", "2"),
        ("4", "0,1,2,3", "4"),
        ("8", "0,1,2,3", "4"),
        (None, "0,1,2,3", "4"),
    ],
)
def test_mpirun_of_open_mpi_has_the_gpus_of_its_host_that_were_asked_for(
    batch: FakeBatch, per_node: str | None, visible: str, on_node: str
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}
    asked = {"SLURM_GPUS_PER_NODE": per_node} if per_node else {}
    last = run_template(batch, "slurm-mpirun.sbatch", "my.py", **env, **asked).rows[-1]["env"]
    assert (last["CUDA_VISIBLE_DEVICES"], last["SLURM_GPUS_ON_NODE"]) == (visible, on_node)


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


@pytest.mark.slow
def test_slurm_does_not_trust_an_mpirun_that_ends_before_the_job(batch: FakeBatch) -> None:
    assert run_template(batch, "slurm-mpirun.sbatch", "my.py", DGM_CHECK="no").rc == 0
    # a requeued job finds what its first run has left
    batch.answers["mpirun -np 2"] = ("", 0)
    ran = run_template(batch, "slurm-mpirun.sbatch", "my.py", DGM_CHECK="no")
    assert ran.rc == 1
    assert "mpirun exited with code 0, but the job has not completed" in ran.output
    assert ran.output.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "refused"),
    [
        ("slurm.sbatch", MPICH, None),
        ("slurm.sbatch", OPEN_MPI, "srun --mpi=pmix"),
        ("slurm-mpirun.sbatch", MPICH, "mpirun"),
    ],
)
def test_slurm_has_heterogeneous_jobs(batch: FakeBatch, name: str, library: str, refused: str | None) -> None:
    batch.answers |= {
        "python -m mpi4py": (library, 0),
        "mpirun --version": ("HYDRA build details:" if library == MPICH else library, 0),
        "squeue": ("2030-01-02T03:14:05\n2030-01-02T03:04:05\n", 0),
    }
    ran = run_template(batch, name, "my.py", SLURM_HET_SIZE="3")
    if refused:
        assert ran.rc == 2
        assert f"heterogeneous jobs of Slurm can't be started by {refused} (expected srun and" in ran.output
        assert ran.output.count("\n") == 1
        return
    assert "--het-group=0-2" in ran.launched("srun")
    # the first part whose time is over ends all
    assert ran.rows[-1]["env"]["SLURM_JOB_END_TIME"] == "1893553445"


#: scancel tells srun and the batch script; where mpirun is the launcher, maybe the script alone, and more than once.
STOPPED = {
    "slurm.sbatch": """#!/bin/bash
if [[ $1 == --mpi=list ]]; then exit; fi
kill $PPID
exit 75
""",
    "slurm-mpirun.sbatch": """#!/bin/bash
if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi
trap 'sleep 0.2; kill $PPID; sleep 0.5; echo "the checkpoint"; exit 75' TERM
sleep 0.5
kill $PPID
for ((i = 0; i < 100; i++)); do sleep 0.1; done
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_slurm_does_not_requeue_a_job_that_was_cancelled(batch: FakeBatch, name: str) -> None:
    command = batch.bin / ("srun" if name == "slurm.sbatch" else "mpirun")
    command.unlink()
    command.write_text(STOPPED[name])
    command.chmod(0o755)
    ran = run_template(batch, name, "my.py", DGM_CHECK="no")
    assert (ran.rc, ran.of("scontrol")) == (75, []), ran.output
    assert ran.output.count("the checkpoint") == (name == "slurm-mpirun.sbatch")


SIGNALS = {
    "slurm.sbatch": "##SBATCH --signal=USR1@120",
    "slurm-mpirun.sbatch": "##SBATCH --signal=B:USR1@120",
    "lsf.bsub": "##BSUB -wa USR1 -wt 2",
    "flux.sh": "# export DGM_SIGNAL=USR1@120  # to all ranks, before the walltime",
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


#: A launcher that tells its script of the walltime, and passes the signal on, as mpirun does.
WARNED = """#!/bin/bash
if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi
trap 'echo "the checkpoint"; exit 75' USR1
kill -USR1 $PPID
for ((i = 0; i < 100; i++)); do sleep 0.1; done
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm-mpirun.sbatch", "lsf.bsub"])
def test_script_outlives_the_signal_before_the_walltime(batch: FakeBatch, name: str) -> None:
    (batch.bin / "jsrun").unlink()
    (batch.bin / "mpirun").unlink()
    # LSF tells all processes of the job itself
    (batch.bin / "mpirun").write_text(
        WARNED if name != "lsf.bsub" else WARNED.replace("$PPID", "$PPID; kill -USR1 $$")
    )
    (batch.bin / "mpirun").chmod(0o755)
    ran = run_template(batch, name, "my.py", DGM_CHECK="no")
    assert ran.rc == 75, ran.output
    assert ran.output.count("the checkpoint") == 1
    assert ran.of("scontrol") == ([["requeue", "42"]] if name == "slurm-mpirun.sbatch" else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-mpirun.sbatch"])
def test_slurm_requeues_one_member_of_an_array(batch: FakeBatch, name: str) -> None:
    batch.answers["start"] = ("", 75)
    array = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "0"}
    ran = run_template(batch, name, "my.py", DGM_CHECK="no", **array)
    assert ran.of("scontrol") == [["requeue", "42_0"]]
    # of 42, squeue tells the end of every member
    assert ran.of("squeue") == [["-h", "-j", "42_0", "-o", "%e"]]


@pytest.mark.slow
def test_lsf_requeues_up_to_a_limit(batch: FakeBatch) -> None:
    # LSF requeues after 75, whenever and however often it comes
    batch.answers["start"] = ("", 75)
    codes = [run_template(batch, "lsf.bsub", "my.py", DGM_CHECK="no", DGM_RESTARTS="2").rc for _ in range(3)]
    assert codes == [75, 75, 1]
    member = {"DGM_CHECK": "no", "DGM_RESTARTS": "0", "LSB_JOBINDEX": "7"}
    ran = run_template(batch, "lsf.bsub", "my.py", **member)
    assert ran.rc == 1
    assert "not requeued: 0 restarts so far" in ran.output
    counts = {str(path.relative_to(batch.directory)) for path in batch.directory.glob("logs/**/*restarts")}
    assert counts == {"logs/42/42.restarts", "logs/42_7/42_7.restarts"}
    batch.answers["start"] = ("", 3)
    assert run_template(batch, "lsf.bsub", "my.py", **member).rc == 3


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
