"""What a job script is to request; what is written: test_templates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask.config
import pytest
from click.testing import CliRunner

import dask_gpu_mpi
from dask_gpu_mpi.cli.jobscript import request
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import InputError, OptionError, StartupError
from dask_gpu_mpi.sites.batch import batch_system
from dask_gpu_mpi.sites.jobscript import render

SHAPE = {"nodes": "2", "gpus_per_node": "4", "time": "01:30:10"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("00:00:00", "0:00:00", "0000:00:00", "1:60:00", "1:00:60", "1:00:001"),
        *("0", "0:00", "1-24", "1-0:60", "0-0", "1-", "1d", "-1", "1:00:00:00", ""),
    ],
)
def test_walltime_that_is_none(text: str) -> None:
    with pytest.raises(OptionError, match="^command line: --time: .*(such as 01:30:00; also M, |text)"):
        request("slurm", ["my.py"], SHAPE | {"time": text})


@pytest.mark.parametrize(
    ("system", "text", "seconds"),
    [
        # sbatch(1)
        *(("slurm", "00:00:01", 1), ("slurm", "9999:59:59", 35999999)),
        *(("slurm", "60", 3600), ("slurm", "90:30", 5430), ("slurm", "1-12", 129600)),
        *(("slurm", "1-12:30", 131400), ("slurm", "1-00:00:00", 86400), ("slurm", "1-0:0:1", 86401)),
        # pbs_resources(7): the last part is seconds
        *(("pbs", "3600", 3600), ("pbs", "90:30", 5430), ("pbs", "1:00:00", 3600), ("pbs", "1-12", None)),
        # bsub(1): the last part is minutes
        *(("lsf", "60", 3600), ("lsf", "1:30", 5400), ("lsf", "1:30:00", 5400), ("lsf", "1h", None)),
        # flux-batch(1)
        *(("flux", "60", 3600), ("flux", "90s", 90), ("flux", "2h", 7200), ("flux", "1d", 86400)),
        *(("flux", "1:30", None), ("flux", "1h30m", None)),
    ],
)
def test_walltime_as_the_batch_system_has_it(system: str, text: str, seconds: int | None) -> None:
    assert batch_system(system).seconds(text) == seconds


def test_the_largest_job() -> None:
    assert request("slurm", ["my.py"], SHAPE | {"nodes": "1000", "gpus_per_node": "100"}).nodes == 1000
    for shape in ({"nodes": "1000", "ranks_per_node": "101"}, {"nodes": "1000", "gpus_per_node": "101"}):
        with pytest.raises(OptionError, match="too many .expected at most 100000 in the whole job"):
            request("slurm", ["my.py"], SHAPE | shape)


@pytest.mark.parametrize(
    ("system", "cpus", "notes"), [("pbs", None, 1), ("pbs", "32", 0), ("slurm", None, 0)]
)
def test_cores_that_pbs_must_know(
    system: str, cpus: str | None, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    render(request(system, ["my.py"], {**SHAPE, "cpus_per_node": cpus}))
    assert capsys.readouterr().err.count("--cpus-per-node is not set: the job requests") == notes


def test_a_section_that_is_none() -> None:
    said = "^configuration gpu-mpi.jobscript: .*expected names and values"
    with dask.config.set({"gpu-mpi.jobscript": ["nodes"]}), pytest.raises(OptionError, match=said):
        request("slurm", ["my.py"], SHAPE)


def test_a_cluster_without_a_script_needs_a_scheduler_file() -> None:
    assert request("slurm", ["--scheduler-file", "s.json"], SHAPE).program == ("--scheduler-file", "s.json")
    for program in ([], ["--help"], ["--layout", "shared"]):
        with pytest.raises(InputError, match="^command line: the script is missing .expected -- SCRIPT ARGS"):
            request("slurm", program, SHAPE)


def test_where_a_script_is_saved(tmp_path: Path) -> None:
    def saved(path: Path | str) -> tuple[int, str, str]:
        shape = ["--nodes", "1", "--gpus-per-node", "1", "--time", "01:00:00"]
        done = CliRunner().invoke(cli, ["jobscript", "slurm", *shape, "--save", str(path), "--", "my.py"])
        return done.exit_code, done.stdout, done.stderr

    code, out, error = saved(tmp_path)
    assert (code, out) == (2, "")
    assert f"command line: --save '{tmp_path}' can't be written: Is a directory. Fix: " in error
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        assert "can't be written: not a regular file. Fix: " in saved(path)[2]
    path = tmp_path / "job"
    assert saved(path) == (0, "", f"dask_gpu_mpi: {path} is written. Submit it: sbatch < {path}\n")
    (tmp_path / "job").write_text("of the user")
    assert saved(tmp_path / "job")[2].endswith("/job' exists. Fix: remove it, or choose another name\n")
    assert (tmp_path / "job").read_text() == "of the user"


@pytest.mark.parametrize("name", ["time", "account"])
@pytest.mark.parametrize("number", [10**5000, 5400, True], ids=["huge", "base 60", "true"])
def test_text_that_is_a_number(name: str, number: float) -> None:
    """YAML 1.1 reads 1:30:00 as 5400, which Slurm would read as minutes, and an account 0123 as 83."""
    said = rf"^configuration gpu-mpi\.jobscript\.{name}: invalid value .*put it in quotes"
    with dask.config.set({"gpu-mpi.jobscript": {name: number}}), pytest.raises(OptionError, match=said):
        request("slurm", ["my.py"], {"nodes": "1", "gpus_per_node": "0"})


def test_log_in_a_folder_that_is_missing(tmp_path: Path) -> None:
    """The batch system would end the job without a word."""
    given = {"nodes": "1", "gpus_per_node": "0", "time": "10"}
    with pytest.raises(OptionError, match=r"--output: the folder .*/no does not exist\. Fix: mkdir -p /"):
        request("slurm", ["-c", "0"], {**given, "output": f"{tmp_path}/no/%j.log"})
    for output in (f"{tmp_path}/%j.log", f"{tmp_path}/%j/log", "job.log"):
        request("slurm", ["-c", "0"], {**given, "output": output})


def test_script_that_python_can_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the job has another environment, with another Python."""
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "setup.sh").touch()
    given = {"nodes": "1", "gpus_per_node": "0", "time": "10"}
    with pytest.raises(StartupError, match=r"bad\.py': Python can't compile it"):
        request("slurm", [str(tmp_path / "bad.py")], given)
    assert "SyntaxError" in capsys.readouterr().err
    request("slurm", [str(tmp_path / "bad.py")], {**given, "setup": str(tmp_path / "setup.sh")})


# --- from Python


def test_script_from_python_is_that_of_the_command() -> None:
    shape = {"nodes": 2, "gpus_per_node": 4, "time": "1-12"}
    text = dask_gpu_mpi.job_script(
        "slurm", ["my.py", "a b"], account="abc", shared=True, cpus_per_node=8, modules=["cuda"], **shape
    )
    words = "--nodes 2 --gpus-per-node 4 --time 1-12 --account abc --shared --cpus-per-node 8 --module cuda"
    done = CliRunner().invoke(cli, ["jobscript", "slurm", *words.split(), "--", "my.py", "a b"])
    assert (done.exit_code, done.stdout) == (0, text)
    assert dask_gpu_mpi.job_script("slurm", Path("my.py"), **shape) == dask_gpu_mpi.job_script(
        "slurm", "my.py", **shape
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"time": 60}, "^keyword time: invalid value 60 .int; expected"),
        ({"time": "1-25"}, "^keyword time: invalid value '1-25' .expected a walltime of Slurm"),
        ({"nodes": None}, "^keyword nodes is missing .expected a number"),
        ({"time": None}, "^keyword time is missing .expected a walltime such as"),
        ({"noodles": 2}, "^keyword noodles: unknown option; did you mean 'nodes'"),
        ({"modules": 3}, "^keyword modules: invalid value 3"),
    ],
)
def test_what_python_may_not_give(given: dict[str, Any], message: str) -> None:
    shape = {"nodes": 2, "gpus_per_node": 4, "time": "1:00:00"}
    with pytest.raises(OptionError, match=message):
        dask_gpu_mpi.job_script("slurm", "my.py", **shape | given)
