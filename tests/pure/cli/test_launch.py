"""The command `launch`; what it decides: tests/pure/sites, its jobs: tests/mpi/test_launch.py."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import dask
import pytest

from dask_gpu_mpi.cli.main import main
from dask_gpu_mpi.sites.command import STAGE, START
from dask_gpu_mpi.sites.launchers import scrub
from support.jobs.clusters import packed_environment
from support.mocks.launchers import SAMPLES

BATCH = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "FLUX_URI")
SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "h1"}


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*BATCH, *(os.environ.keys() - scrub(os.environ).keys())}:
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    return int(caught.value.code or 0)


Dry = Callable[..., list[str]]
Make = Callable[..., Path]


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str]) -> Dry:
    """The words of what would be run."""

    def words(*arguments: str) -> list[str]:
        assert run("--dry-run", *arguments) == 0
        return shlex.split(capsys.readouterr().out)

    return words


def test_dry_run_has_the_options_of_run_and_the_script_as_they_are(
    dry: Dry,
) -> None:
    options = ["--worker-options", '{"a": "b c"}', "--interface", "lo"]
    script = ["my.py", "-n", "--check"]
    found = dry("--no-dashboard", "-n3", *options, *script)
    assert " ".join(found[:7]) == "# this machine: 1 node, 3 ranks"
    assert found[found.index(START) + 1 :] == ["run", *options, "--no-dashboard", *script]
    assert "--check" not in found[: found.index("run")]
    found = dry("--hosts", "h1,h2:2", "--check", "my.py")
    assert found.count("h1:1,h2:2") == 2
    assert "h1:1,h2:2" in dry("--hosts", "h1,h2:2", "-n3", "my.py")
    assert "h1:2,h2:2" in dry("--hosts", "h1,h2", "-n4", "my.py")
    assert found.index("check") < found.index("&&") < found.index("run")


def test_one_node_needs_neither_a_launcher_nor_an_mpi_library(
    dry: Dry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> tuple[str, str]:
        raise AssertionError("the MPI library is not needed")

    with monkeypatch.context() as patch:
        patch.setattr("dask_gpu_mpi.sites.choice.ask_library", ask)
        patch.setenv("PATH", "/gone")
        for given in ((), ("--launcher", "auto"), ("--hosts", "localhost"), ("--profile", "perf record")):
            found = dry("-n2", *given, "my.py")
            assert found[found.index(START) - 2] == sys.executable
            assert "--bind-to" not in found
        patch.delenv("PATH")
        for given in (("--launcher", "mpirun"), ("--hosts", "h1,h2"), ("--launcher-option=--tag-output",)):
            with pytest.raises(AssertionError):
                main(["launch", "--dry-run", *given, "my.py"])
        patch.setenv("DGM_MPI", "pmix")
        with pytest.raises(AssertionError):
            main(["launch", "--dry-run", "my.py"])
    found = dry("-n2", "--launcher", "mpirun", "my.py")
    assert found[found.index(sys.executable) - 1] == "none"  # of --bind-to


def test_options_for_the_launcher_come_after_ours(dry: Dry) -> None:
    given = ["--launcher-option=-genv A=1", "--launcher-option=--comment='a b'"]
    found = dry("-n", "2", *given, "my.py", "--launcher-option=x")
    at = found.index("-genv")
    assert found[at : at + 3] == ["-genv", "A=1", "--comment=a b"]
    assert found[at + 4 : at + 6] == ["-c", START]
    assert found[-2:] == ["my.py", "--launcher-option=x"]


def test_the_plugin_of_srun(dry: Dry, program: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    program("srun")
    for variable, value in SLURM.items():
        monkeypatch.setenv(variable, value)
    assert "--mpi=pmi2" in dry("--launcher", "srun", "--mpi", "pmi2", "my.py")


def test_a_file_of_dasks_configuration_beats_the_defaults_of_a_job(
    dry: Dry, program: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("srun")
    for variable, value in {**SLURM, "SLURM_JOB_ID": "42"}.items():
        monkeypatch.setenv(variable, value)
    line = " ".join(dry("--launcher", "srun", "--mpi", "pmi2", "my.py"))
    assert "--log-directory logs/42" in line
    assert "DASK_GPU_MPI__WALLTIME_SIGNAL=USR1" in line
    with dask.config.set({"gpu-mpi.log-directory": "/x", "gpu-mpi.walltime-signal": "USR2"}):
        line = " ".join(dry("--launcher", "srun", "--mpi", "pmi2", "my.py"))
    assert "--log-directory" not in line
    assert "WALLTIME_SIGNAL" not in line


def test_check_without_a_script_is_all_there_is(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    def commands(*given: str) -> list[str]:
        return [word for word in dry("--check", *given) if word in ("check", "run")]

    assert commands("--expect-gpus", "2") == ["check"]
    assert commands("--scheduler-file", "f.json") == ["check", "run"]  # for clients elsewhere
    assert commands("--no-scheduler", "--scheduler-address", "tls://h:1") == ["check", "run"]
    with monkeypatch.context() as patch, dask.config.set({"gpu-mpi.scheduler-file": "f.json"}):
        assert commands() == ["check", "run"]
        patch.setenv("DGM_CHECK", "no")
        assert commands() == ["run"]
        assert commands("check") == ["check"]
        patch.setenv("DGM_CHECK", "off")
        assert commands() == ["run"]
        patch.setenv("DGM_CHECK", "perhaps")
        assert run("--dry-run", "--check", "my.py") == 2
        assert run("--dry-run", "my.py") == 2
        patch.setenv("DGM_CHECK", "yes")
        assert commands("my.py") == ["check", "run"]


SLURMS = ("--launcher", "srun", "--mpi", "pmi2")


@pytest.mark.parametrize(
    ("environ", "given", "warned"),
    [
        ({}, ("-n8",), ""),
        (
            {},
            ("-n9",),
            "9 ranks on 2 cores: the start takes long, and workers share cores. Fix: -n 2, or fewer",
        ),
        (
            {"DGM_SETUP": "/env.sh"},
            (),
            "DGM_SETUP: '/env.sh' is not read: only job scripts do that. Fix: source it before",
        ),
        (
            {},
            ("my.py", "-n", "4"),
            "one rank starts: -n comes after the script, which gets it. Fix: options of launch before",
        ),
        (
            {"DGM_LAUNCHER": "srun"},
            (),
            "DGM_LAUNCHER: 'srun' is not read: only job scripts do that. Fix: --launcher",
        ),
        ({}, ("-n1", "my.py", "-n", "4"), ""),
        ({}, ("my.py", "-n", "100000"), ""),
        ({}, ("my.py", "-n"), ""),
        ({"DGM_SETUP": "/env.sh", **SLURM}, SLURMS, ""),
        (
            {"DGM_SETTUP": "/env.sh", **SLURM},
            SLURMS,
            "environment DGM_SETTUP: no effect. Fix: did you mean DGM_SETUP?",
        ),
        (
            {"DGM_RESTART": "1", "DGM_PBS_CPUS": "4", "DGM_PBS_GPUS": "2", "DGM_RUN": "1", "XDGM_LOGS": "1"},
            (),
            "",
        ),
        ({}, ("--mpi", "pmi2"), "--mpi: no effect, since "),
        (
            {},
            SLURMS,
            "--launcher srun: no job of its batch system was found here, so srun itself requests one. Fix: start it in a job",
        ),
    ],
)
def test_warnings_before_the_ranks_start(
    environ: dict[str, str],
    given: tuple[str, ...],
    warned: str,
    program: Make,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dask_gpu_mpi.sites.execute.run_launch", lambda *_: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    program("srun")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run(*given, "my.py") == 0
    said = capsys.readouterr().err
    assert said.startswith(f"dask_gpu_mpi: warning: launch: {warned}" if warned else "")
    assert len(said.splitlines()) == bool(warned)


def test_settings_of_a_job_script(
    dry: Dry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables; an option wins, and an empty variable is none."""
    monkeypatch.setenv("DGM_EXPECT_GPUS", "4")
    monkeypatch.setenv("DGM_SCRATCH", "/nvme")
    monkeypatch.setenv("DGM_CONTAINER", "")
    monkeypatch.setenv("DGM_MPI", "")
    found = dry("--check", "my.py")
    assert found[found.index("check") + 1] == "--expect-gpus=4"
    assert "DASK_GPU_MPI__LOCAL_DIRECTORY=/nvme" in found
    assert "apptainer" not in found
    assert "--expect-gpus=2" in dry("--check", "--expect-gpus", "2", "my.py")
    monkeypatch.setenv("DGM_CHECK", "no")
    assert "check" not in dry("--check", "my.py")
    monkeypatch.setenv("DGM_RANKS_PER_NODE", "3")
    assert " ".join(dry("my.py")[:7]) == "# this machine: 1 node, 3 ranks"
    monkeypatch.setenv("DGM_EXPECT_GPUS", "four")
    assert run("--dry-run", "my.py") == 2
    assert "DGM_EXPECT_GPUS: 'four' is not a whole number" in capsys.readouterr().err
    assert run("--dry-run", "--expect-gpus=five", "my.py") == 2
    assert "'--expect-gpus': 'five' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["option", "variable", "configuration"])
def test_the_workers_directory_is_in_their_container(
    dry: Dry, program: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    image = tmp_path / "image.sif"
    image.touch()
    # runs what comes behind the image with this Python
    runtime = f'#!/bin/sh\nuntil [ "$1" = {image} ]; do shift; done\nshift 2\nexec {sys.executable} "$@"\n'
    program("apptainer", runtime)
    local = tmp_path / "local"
    local.mkdir()
    given = ["--local-directory", str(local)] if by == "option" else []
    if by == "variable":
        monkeypatch.setenv("DGM_SCRATCH", str(local))
    with dask.config.set({"gpu-mpi.local-directory": str(local)} if by == "configuration" else {}):
        assert f"--bind={local}:{local}" in dry("--container", str(image), *given, "my.py")


def test_below_a_launcher_it_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SAMPLES["Open MPI's mpirun"].items():
        monkeypatch.setenv(name, value)
    assert run("my.py") == 2
    assert capsys.readouterr().err == ""  # rank 0 says it
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert run("my.py") == 2
    assert (
        "this is already rank 0 of 4 of Open MPI's mpirun. Fix: `dask-gpu-mpi run`" in capsys.readouterr().err
    )


def test_working_directory_that_was_deleted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("os.getcwd", gone)
    monkeypatch.setenv("PWD", "/nowhere")
    assert run("my.py") == 2
    said = "dask_gpu_mpi: error: launch: the working directory was deleted (expected"
    assert capsys.readouterr().err.startswith(said)


def removed(found: list[str]) -> str:
    """The folder that the last of these commands removes."""
    return found[len(found) - found[::-1].index(STAGE)]


def test_a_copy_of_an_environment(dry: Dry, tmp_path: Path) -> None:
    archive = packed_environment(tmp_path)
    given = ["--local-directory", str(tmp_path / "local"), "my.py"]
    found = dry("--stage", str(archive), *given)
    folder = removed(found)
    assert folder.startswith(f"{tmp_path}/local/dgm-stage-")
    assert f"{folder}/env/bin/python" in found


def test_a_requeued_job_has_the_copies_of_the_same_command_line(
    dry: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed_environment(tmp_path)
    given = ["--stage", str(archive), "--local-directory", str(tmp_path), "--requeue", "2"]

    def name(*program: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dask-gpu-mpi", "launch", *given, *program])
        found = dry(*given, *program)
        return os.path.basename(removed(found))

    assert name("a.py") != name("a.py")  # no job
    for variable, value in SLURM.items():
        monkeypatch.setenv(variable, value)
    assert name("a.py").startswith("dgm-stage-42-")
    assert name("a.py") == name("a.py") != name("b.py")


def test_command_that_starts_the_ranks_of_the_job(
    dry: Dry, program: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TACC's ibrun does: it is used as it is, and never asked for its version, which could start something."""
    ibrun = program("ibrun", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    for name, value in (SLURM | {"SLURM_JOB_NUM_NODES": "2"}).items():
        monkeypatch.setenv(name, value)
    found = dry("--launcher-command", "ibrun -v", "--launcher-option=-o 2", "--report", "x.json", "my.py")
    at = found.index(str(ibrun))
    assert found[at + 1 : at + 5] == ["-v", "-o", "2", sys.executable]
    assert not (tmp_path / "started").exists()
