"""Named sites: `jobscript --site`, and the job scripts of 22 computing centres against their pages."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

import dask.config
import pytest
import yaml
from click.testing import CliRunner

from dask_gpu_mpi.cli.jobscript import request
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.sites.batch import batch_system
from support import ROOT
from support.mocks import inputs
from support.mocks.batch import directives
from support.sites import ROWS, Row

FILES = sorted((ROOT / "dask_gpu_mpi" / "sites" / "named").iterdir())
#: Runs the command.
command = partial(inputs.command, "jobscript")
SHAPE = ("-N", "1", "-t", "60")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASK_GPU_MPI_SITE", raising=False)
    return tmp_path


def refused(*words: str, code: int = 2) -> str:
    done = CliRunner().invoke(cli, ["jobscript", *words])
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    return done.stderr


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_script_has_the_lines_that_the_page_of_the_site_requires(row: Row) -> None:
    text = command(*shlex.split(row.words), "-t", "01:00:00", "--", "my.py")
    found = directives(text, batch_system(row.system).prefix)
    assert set(shlex.split(row.required)) <= set(found)
    forbidden = tuple(shlex.split(row.forbidden))
    required = shlex.split(row.required)
    assert [line for line in found if line not in required and forbidden and line.startswith(forbidden)] == []
    # no option is there twice
    names = [batch_system(row.system).option_name(line) for line in found]
    assert sorted(names) == sorted(set(names))


def test_rows_of_the_sites_with_another_launcher() -> None:
    assert "--launcher pals" in command("--site", "polaris", *SHAPE, "--", "my.py")
    derecho = command("--site", "derecho", *SHAPE, "--", "my.py")
    assert "--launcher pals" in derecho
    assert "module load cuda " in derecho
    vista = command("--site", "vista", *SHAPE, "--", "my.py", "a")
    assert "program=(--launcher-command=ibrun my.py a)" in vista
    assert "export DGM_EXPECT_GPUS=1\n" in vista  # Slurm is asked for none, so it reports none


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_tells_its_source_and_sets_options_only(file: Path) -> None:
    assert file.read_text().startswith("# Written from its documentation, not run there.\n")
    site = yaml.safe_load(file.read_text())
    assert site["title"]
    assert "20" in site["page"] or "undated" in site["page"]
    # every site is in the table above
    assert any(f"--site {file.stem} " in f"{row.words} " for row in ROWS) or file.stem == "lonestar6"
    shape = {"gpus": "1"} if file.stem == "sophia" else {"nodes": "1"}
    assert (
        request(site["system"], ["my.py"], {**shape, "time": "60", "site": file.stem}).system
        == site["system"]
    )


def test_list_of_sites() -> None:
    listed = command("--site")
    assert all(file.stem in listed for file in FILES)
    assert "Running Jobs on Polaris, 2026-08-19" in listed
    assert "not run there" in listed


def test_options_win_over_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_SITE", "roihu")
    words = (
        "-p gpularge --gpus-per-node 1 --cpus-per-node 9 --exclusive --directive=--gres=gpu:gh200:1,nvme:5"
    )
    found = directives(command(*SHAPE, *words.split(), "--", "my.py"), "#SBATCH ")
    expected = {"--partition=gpularge", "--cpus-per-task=9", "--exclusive", "--gres=gpu:gh200:1,nvme:5"}
    assert expected <= set(found)
    assert "--gres=gpu:gh200:1" not in found
    # the type of the site stays, and the option wins over the variable
    assert "--gres=gpu:gh200:2" in command(*SHAPE, "--gpus-per-node", "2", "--", "my.py")
    assert "-l select=1:ncpus" in command("--site=casper", *SHAPE, "--", "my.py")
    with dask.config.set({"gpu-mpi.jobscript": {"queue": "mine"}}):
        assert "--partition=mine" in command(*SHAPE, "--", "my.py")


def test_file_of_a_centre(here: Path) -> None:
    (here / "ours.yaml").write_text("system: slurm\ngpus-per-node: 4\nqueue: gpu\nmodules: [cuda]\n")
    made = command("--site", "ours.yaml", *SHAPE, "--module", "x", "--", "my.py")
    assert "--partition=gpu" in made
    assert "module load cuda x " in made  # the site needs its own in any case
    (here / "ours.yaml").write_text(
        "system: slurm\ngpus-per-node: 4\nlaunch-options: [--launcher-command=ibrun]\n"
    )
    made = command("--site", "ours.yaml", *SHAPE, "--launch-option=--summary", "--", "my.py", "--site")
    assert "program=(--launcher-command=ibrun --summary my.py --site)" in made


def test_values_of_a_file_stay_as_they_are_written(here: Path) -> None:
    """YAML 1.1 would make 83 of the account, and 5400 of the time."""
    text = "system: slurm\naccount: 0123\ntime: 1:30:00\nshared: true\ncpus-per-gpu: 16\nqueue:\nqos: null\n"
    (here / "ours.yaml").write_text(text)
    made = command("--site", "ours.yaml", "-N", "1", "--gpus-per-node", "4", "--", "my.py")
    expected = {"--account=0123", "--time=01:30:00", "--cpus-per-task=64"}
    assert {f"#SBATCH {each}" for each in expected} <= {*made.splitlines()}
    assert not [
        line for line in made.splitlines() if "--exclusive" in line or "partition" in line or "qos" in line
    ]


def test_pipe_is_no_file_of_a_site(here: Path) -> None:
    """It would block until somebody writes into it."""
    os.mkfifo(here / "pipe.yaml")
    assert "can't be read (not a regular file)" in refused("--site", "pipe.yaml", *SHAPE, "--", "my.py")


def test_site_of_the_configuration_names_the_batch_system() -> None:
    with dask.config.set({"gpu-mpi.jobscript.site": "polaris"}):
        assert "#PBS -l select=1:" in command(*SHAPE, "--", "my.py")


def test_site_whose_gpus_can_not_be_used_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(cli, ["jobscript", "--site", "lumi-g", *SHAPE, "--", "my.py"])
    assert done.exit_code == 0
    assert "--site lumi-g: its GPUs are of AMD" in done.stderr


def test_memory_of_gpus_without_nodes(here: Path) -> None:
    message = "--memory-per-node with --gpus: in PBS each GPU is a part of the job"
    assert message in refused("pbs", "--gpus", "8", "--mem", "64G", "-t", "60", "--", "my.py")


@pytest.mark.parametrize("system", ["lsf", "flux"])
def test_cores_of_whole_nodes(system: str) -> None:
    words = (system, *SHAPE, "--gpus-per-node", "4", "--cpus-per-gpu", "8")
    assert "--cpus-per-node 32: " in refused(*words, "--", "my.py")
    assert "32" in command(*words, "--shared", "--", "my.py")


@pytest.mark.parametrize("option", ["--mem=64G", "--ranks-per-node=4"])
def test_option_that_the_site_takes_out(option: str) -> None:
    message = refused("--site", "archer2", *SHAPE, option, "--", "my.py")
    assert " among the directives takes it out. Fix: leave one of them out" in message


def test_variable_of_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_SITE", "casper")
    assert "Fix: name pbs, or unset DASK_GPU_MPI_SITE" in refused("slurm", *SHAPE, "--", "my.py")


def test_site_whose_directives_need_nodes() -> None:
    message = refused("--site", "polaris", "--gpus", "3", "-t", "60", "--", "my.py")
    assert "{nodes} is not known for this job" in message
    assert "Fix: --nodes N --gpus-per-node NUMBER" in message


def test_launcher_of_pbs() -> None:
    words = ("pbs", *SHAPE, "--gpus-per-node", "4")
    assert "DGM_LAUNCHER=" not in command(*words, "--", "my.py")
    assert "export DGM_LAUNCHER=mpirun" in command(*words, "--launcher", "mpirun", "--", "my.py")


def test_option_of_pbs_without_a_blank() -> None:
    text = command("pbs", *SHAPE, "--gpus-per-node", "4", "--directive=-lselect=2:ncpus=3", "--", "my.py")
    assert [line for line in text.splitlines() if "select" in line] == ["#PBS -lselect=2:ncpus=3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queue: gpu\n", "the batch system is missing (expected system: one of slurm, pbs"),
        ("- 1\n", "the batch system is missing"),
        ("system: slurm\na: [\n", "can't be read (while parsing"),
        ("system: slurm\nqueue: a b\n", "queue: invalid value 'a b'"),
        ("system: slurm\nqueues: a\n", "queues: unknown option; did you mean 'queue'"),
        ("system: slurm\ngpus-per-nod: 4\n", "unknown option; did you mean 'gpus-per-node'"),
        ("system: slurm\npartition: a\n", "partition: unknown option; did you mean 'queue'"),
        ("system: slurm\nsite: triton\n", "the file names another site. Fix: leave out its line `site`"),
        (
            "system: slurm\ndirectives: ['--gpus={gpu}']\ngpus-per-node: 1\n",
            "{gpu} is not known for this job",
        ),
    ],
)
def test_file_that_can_not_be_used(here: Path, text: str, message: str) -> None:
    (here / "bad.yaml").write_text(text)
    assert message in refused("--site", "bad.yaml", *SHAPE, "--", "my.py")


def test_sites_that_are_unknown() -> None:
    assert "--site roiho: unknown site; did you mean 'roihu'?" in refused(
        "--site", "roiho", *SHAPE, "--", "my.py"
    )
    assert "--site ../x: unknown site" in refused("--site", "../x", *SHAPE, "--", "my.py")
    assert "--site no.yaml: can't be read" in refused("--site", "no.yaml", *SHAPE, "--", "my.py")
    assert "its batch system is pbs, not slurm. Fix: name pbs, or no site" in refused(
        "slurm", "--site", "casper", *SHAPE, "--", "my.py"
    )


@pytest.mark.parametrize(
    ("words", "required"),
    [
        ("slurm --gpus 8 --cpus-per-gpu 4", "--gpus=8 --cpus-per-gpu=4"),
        ("pbs --gpus 8 --cpus-per-gpu 4", "'-l select=8:ncpus=4:mpiprocs=1:ngpus=1' '-l place=free:excl'"),
    ],
)
def test_number_of_gpus_without_a_number_of_nodes(words: str, required: str) -> None:
    text = command(*words.split(), "-t", "60", "--", "my.py")
    found = directives(text, batch_system(words.split()[0]).prefix)
    assert set(shlex.split(required)) <= set(found)
    assert not [line for line in found if line.startswith(("--nodes", "--gpus-per-node", "--ntasks"))]
    assert "\n# 8 GPUs. Made by" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slurm --gpus 8 -N 2", "--nodes: can't be combined with --gpus"),
        ("slurm --gpus 8 --ranks-per-node 2", "--ranks-per-node: can't be combined with --gpus"),
        ("slurm --gpus 8 --cpus-per-node 2", "--cpus-per-node: can't be combined with --gpus"),
        (
            "slurm -N 1 --gpus-per-node 1 --cpus-per-gpu 8 --cpus-per-node 2",
            "can't be combined with --cpus-per-gpu",
        ),
        ("lsf --gpus 8", "--gpus: LSF has no such request. Fix: --nodes and --gpus-per-node"),
        ("--site roihu --gpus 8", "{gpus} is not known for this job"),
    ],
)
def test_numbers_that_contradict_each_other(words: str, message: str) -> None:
    assert message in refused(*words.split(), "-t", "60", "--", "my.py")
