"""What a job script is to request: by the command, Python, configuration and named sites; what is refused."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml
from click.testing import CliRunner

import dask_gpu_mpi
from dask_gpu_mpi.cli.job_request import request
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import OptionError, StartupError
from dask_gpu_mpi.sites.jobscript import format_of, render
from support import ROOT
from support.mocks.batch import requested, script
from support.sites import ROWS, Row

FILES = sorted((ROOT / "dask_gpu_mpi" / "sites" / "named").iterdir())
#: The rest of a request at a site, of one on its own, and that as values of options.
ONE = "-N 1 -t 60"
SHAPE = "-N 2 --gpus-per-node 4 -t 01:30:10"
GIVEN = {"nodes": "2", "gpus_per_node": "4", "time": "01:30:10"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the script of these jobs."""
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASK_GPU_MPI_SITE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"slurm {SHAPE} --nodes {'9' * 18}", "expected at most 100000 in the whole job"),
        (f"slurm {SHAPE} --gpus-per-node 100000", "--nodes 2 --gpus-per-node 100000: too many"),
        (f"slurm {SHAPE} --ranks-per-node 50001", "--nodes 2 --ranks-per-node 50001: too many"),
        (f"slurm {SHAPE} -t 00:00:00", "--time: invalid value '00:00:00' (expected a walltime of Slurm above zero, such"),
        (f"pbs {SHAPE} -t 1-12", "expected a walltime of PBS above zero, such as 01:30:00; also "),
        (f"slurm {SHAPE} -t 1-25", "--time: invalid value '1-25'"),
        (f"slurm {SHAPE} --account 'a\n#SBATCH --wrap=x'", "--account: "),
        (f"pbs {SHAPE} --queue '$(id)'", "--queue: invalid value '$(id)'"),
        (f"slurm {SHAPE} --directive '--a\n--b'", "--directive: "),
        (f"slurm {SHAPE} --launcher pals", "not available under Slurm (expected one of srun, mpirun, mpiexec)"),
        (f"pbs {SHAPE} --directive=--nodes=8", "--directive: '--nodes=8' is not an option of PBS (expected one of qsub, "),
        (f"slurm {SHAPE} --output job.sbatch", "Fix: --save job.sbatch writes the job script there"),
        (f"slurm {SHAPE} --output 'a b'", "--output: invalid value 'a b'"),
        (f"slurm {SHAPE} --output no/%j.log", "--output: the folder no does not exist. Fix: mkdir -p no"),
        (f"slurm {SHAPE} --mem 64", "--memory-per-node: invalid value '64' (expected a size such as 64G"),
        (f"slurm {SHAPE} --gpus-per-node a100", "invalid value 'a100' (expected a number, or TYPE:NUMBER"),
        (f"pbs {SHAPE} --gpus-per-node a100:4", "--gpus-per-node a100:4: PBS has no type there"),
        ("slurm -- my.py", "command line: --nodes, --gpus-per-node, --time are missing (expected a number; "),
        (f"slurm {SHAPE} --shared", "--shared: the cores of the job are missing. Fix: add --cpus-per-node"),
        (f"slurm {SHAPE} --shared --cpus-per-node 5 --ranks-per-node 2", "gives all ranks the same number (expected a multiple"),
        (f"flux {SHAPE} --mem 64G", "--memory-per-node: Flux allocates no memory"),
        (f"lsf {SHAPE} --qos x", "--qos: LSF has no such option (expected one of account, queue, mail_user, output)"),
        (f"lsf {SHAPE} --cpus-per-gpu 8", "--cpus-per-node 32: LSF gives whole nodes"),
        (f"flux {SHAPE} --cpus-per-gpu 8", "--cpus-per-node 32: Flux gives whole nodes"),
        (f"slurm {SHAPE} --setup gone.sh", "--setup 'gone.sh' does not exist (expected a file that the job can source)"),
        (f"moab {SHAPE}", "unknown batch system 'moab' (expected one of slurm, pbs, lsf, flux). Fix: name it before all options"),
        # the command line of the job, before it waits in the queue
        (f"slurm {SHAPE} --submit -- gone.py", "script 'gone.py' does not exist"),
        (f"slurm {SHAPE} -- dask-gpu-mpi launch my.py", "Fix: give the script alone, without a command before it"),
        (f"slurm {SHAPE} --submit -- -m gone", "no module named 'gone'"),
        (f"slurm {SHAPE} --submit -- -n 2 my.py", "--ranks of launch: the job script has it"),
        (f"slurm {SHAPE} --submit -- --layuot shared my.py", "'--layuot'"),
        (f"slurm {SHAPE} --submit -- --nthreads 0 my.py", "--nthreads"),
        (f"slurm {SHAPE} -- --help", "the script is missing (expected -- SCRIPT ARGS"),
        (f"slurm {SHAPE} -- --layout shared", "the script is missing (expected -- SCRIPT ARGS"),
        # numbers of GPUs
        ("slurm --gpus 8 -N 2 -t 60", "--nodes: can't be combined with --gpus"),
        ("slurm --gpus 8 --ranks-per-node 2 -t 60", "--ranks-per-node: can't be combined with --gpus"),
        ("slurm --gpus 8 --cpus-per-node 2 -t 60", "--cpus-per-node: can't be combined with --gpus"),
        (f"slurm {SHAPE} --cpus-per-gpu 8 --cpus-per-node 2", "can't be combined with --cpus-per-gpu"),
        ("lsf --gpus 8 -t 60", "--gpus: LSF has no such request. Fix: --nodes and --gpus-per-node"),
        ("pbs --gpus 8 --mem 64G -t 60", "--memory-per-node with --gpus: in PBS each GPU is a part of the job"),
        # sites
        ("--site roihu --gpus 8 -t 60", "{gpus} is not known for this job"),
        ("--site polaris --gpus 3 -t 60", "Fix: --nodes N --gpus-per-node NUMBER"),
        (f"--site archer2 {ONE} --mem=64G", " among the directives takes it out. Fix: leave one of them out"),
        (f"--site archer2 {ONE} --ranks-per-node=4", " among the directives takes it out. Fix: leave one of them out"),
        (f"--site roiho {ONE}", "--site roiho: unknown site; did you mean 'roihu'?"),
        (f"--site ../x {ONE}", "--site ../x: unknown site"),
        (f"--site no.yaml {ONE}", "--site no.yaml: can't be read"),
        (f"slurm --site casper {ONE}", "its batch system is pbs, not slurm. Fix: name pbs, or no site"),
    ],
)  # fmt: skip
def test_refused(words: str, message: str) -> None:
    *_, error = script(words, rc=2).splitlines()  # notes, and one line
    assert message in error


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        # sbatch(1); no walltime at all
        ("slurm", {"00:00:01": 1, "9999:59:59": 35999999, "60": 3600, "90:30": 5430, "1-12": 129600, "1-12:30": 131400}),
        ("slurm", {"1-00:00:00": 86400, "1-0:0:1": 86401, "1-24": None, "1-0:60": None, "0-0": None, "1-": None, "1d": None}),
        ("slurm", {"00:00:00": None, "0000:00:00": None, "1:60:00": None, "1:00:60": None, "1:00:001": None, "0": None}),
        ("slurm", {"0:00": None, "-1": None, "1:00:00:00": None, "": None}),
        # pbs_resources(7): the last part is seconds
        ("pbs", {"3600": 3600, "90:30": 5430, "1:00:00": 3600, "1-12": None}),
        # bsub(1): the last part is minutes
        ("lsf", {"60": 3600, "1:30": 5400, "1:30:00": 5400, "1h": None}),
        # flux-batch(1)
        ("flux", {"60": 3600, "90s": 90, "2h": 7200, "1d": 86400, "1:30": None, "1h30m": None}),
    ],
)  # fmt: skip
def test_walltime_as_the_batch_system_has_it(system: str, texts: dict[str, int | None]) -> None:
    assert {text: format_of(system).seconds(text) for text in texts} == texts


def test_what_is_not_refused() -> None:
    assert request("slurm", ["my.py"], GIVEN | {"nodes": "1000", "gpus_per_node": "100"}).nodes == 1000
    assert request("slurm", ["--scheduler-file", "s.json"], GIVEN).program == ("--scheduler-file", "s.json")
    for output in (f"{Path.cwd()}/%j.log", "%j/log", "job.log"):
        assert request("slurm", ["my.py"], GIVEN | {"output": output}).words == {"output": output}


@pytest.mark.parametrize(
    ("system", "cpus", "notes"), [("pbs", None, 1), ("pbs", "32", 0), ("slurm", None, 0)]
)
def test_cores_that_pbs_must_know(
    system: str, cpus: str | None, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    render(request(system, ["my.py"], {**GIVEN, "cpus_per_node": cpus}))
    assert capsys.readouterr().err.count("--cpus-per-node is not set: the job requests") == notes


@pytest.mark.parametrize(
    ("system", "time", "said"),
    [
        ("slurm", "1:00", "--time 1:00: 60 seconds with Slurm\n"),
        ("pbs", "60", "--time 60: 60 seconds with PBS\n"),
        ("slurm", "60", ""),
        ("lsf", "1:00", ""),  # an hour
    ],
)
def test_a_walltime_that_may_be_shorter_than_meant(
    system: str, time: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request(system, ["my.py"], {**GIVEN, "time": time})
    assert capsys.readouterr().err == (f"dask_gpu_mpi: {said}" if said else "")


def test_gpus_without_a_worker_are_counted() -> None:
    # three ranks on each host: both roles are on the first one, whose third rank has its GPUs
    assert "--ntasks-per-node=3" in script(f"slurm {SHAPE} --ranks-per-node 3 -- --layout exclusive my.py")
    words = f"jobscript slurm {ONE} --gpus-per-node 2 --ranks-per-node 3 -- my.py"
    assert "more ranks than GPUs: rank 2" in CliRunner().invoke(cli, words.split()).stderr


def test_script_that_python_can_not_compile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the job has another environment, with another Python."""
    (here / "bad.py").write_text("def (")
    (here / "setup.sh").touch()
    with pytest.raises(StartupError, match=r"bad\.py': Python can't compile it"):
        request("slurm", ["bad.py"], GIVEN)
    assert "SyntaxError" in capsys.readouterr().err
    request("slurm", ["bad.py"], {**GIVEN, "setup": "setup.sh"})


def test_where_a_script_is_saved(here: Path) -> None:
    def saved(path: Path | str) -> tuple[int, str, str]:
        words = ["jobscript", "slurm", *SHAPE.split(), "--save", str(path), "--", "my.py"]
        done = CliRunner().invoke(cli, words)
        return done.exit_code, done.stdout, done.stderr

    code, out, error = saved(here)
    assert (code, out) == (2, "")
    assert f"command line: --save '{here}' can't be written: Is a directory. Fix: " in error
    os.mkfifo(here / "pipe")
    for path in ("/dev/null", here / "pipe"):
        assert "can't be written: not a regular file. Fix: " in saved(path)[2]
    path = here / "job"
    assert saved(path) == (0, "", f"dask_gpu_mpi: {path} is written. Submit it: sbatch < {path}\n")
    path.write_text("of the user")
    assert saved(path)[2].endswith("/job' exists. Fix: remove it, or choose another name\n")
    assert path.read_text() == "of the user"


# -- from configuration and Python


@pytest.mark.parametrize("name", ["time", "account"])
@pytest.mark.parametrize("number", [10**5000, 5400, True], ids=["huge", "base 60", "true"])
def test_text_that_is_a_number(name: str, number: float) -> None:
    """YAML 1.1 reads 1:30:00 as 5400, which Slurm would read as minutes, and an account 0123 as 83."""
    said = rf"^configuration gpu-mpi\.jobscript\.{name}: invalid value .*put it in quotes"
    with dask.config.set({"gpu-mpi.jobscript": {name: number}}), pytest.raises(OptionError, match=said):
        request("slurm", ["my.py"], {"nodes": "1", "gpus_per_node": "0"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (["nodes"], "^configuration gpu-mpi.jobscript: .*expected names and values"),
        # the command line's other name for a queue
        ({"partition": "x"}, "^configuration gpu-mpi.jobscript.partition: unknown option"),
    ],
)
def test_section_that_can_not_be_used(section: object, message: str) -> None:
    with dask.config.set({"gpu-mpi.jobscript": section}), pytest.raises(OptionError, match=message):
        request("slurm", ["my.py"], GIVEN)


def test_script_from_python_is_that_of_the_command() -> None:
    shape = {"nodes": 2, "gpus_per_node": 4, "time": "1-12"}
    lists = {"account": "abc", "shared": True, "cpus_per_node": 8, "modules": ["cuda"]}
    words = "slurm -N 2 --gpus-per-node 4 -t 1-12 --account abc --shared --cpus-per-node 8 --module cuda"
    assert dask_gpu_mpi.job_script("slurm", ["my.py", "a b"], **lists, **shape) == script(
        f"{words} -- my.py 'a b'"
    )
    assert "\nprogram=(my.py 3)\n" in dask_gpu_mpi.job_script("slurm", [Path("my.py"), 3], **shape)
    from_path = dask_gpu_mpi.job_script("slurm", Path("my.py"), **shape)
    assert from_path == dask_gpu_mpi.job_script("slurm", "my.py", **shape)


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


# -- named sites


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_script_has_the_lines_that_the_page_of_the_site_requires(row: Row) -> None:
    found = requested(f"{row.words} -t 01:00:00")
    required, forbidden = shlex.split(row.required), tuple(shlex.split(row.forbidden))
    assert set(required) <= set(found)
    assert [line for line in found if line not in required and forbidden and line.startswith(forbidden)] == []
    # no option is there twice
    names = [format_of(row.system).option_name(line) for line in found]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (f"--site polaris {ONE} -- my.py", ["--launcher pals"]),
        (f"--site derecho {ONE} -- my.py", ["--launcher pals", "module load cuda "]),
        # Slurm is asked for no GPUs, so it reports none
        (f"--site vista {ONE} -- my.py a", ["program=(--launcher-command=ibrun my.py a)", "export DGM_EXPECT_GPUS=1\n"]),
        (f"pbs {SHAPE} --launcher mpirun", ["export DGM_LAUNCHER=mpirun"]),
        # a file of a centre, whose modules and options of `launch` are needed in any case
        (f"--site ours.yaml {ONE} --module x", ["--partition=gpu", "module load cuda x "]),
        (f"--site ours.yaml {ONE} --launch-option=--summary -- my.py --site", ["program=(--mpi=pmix --summary my.py --site)"]),
    ],
)  # fmt: skip
def test_lines_that_a_site_or_the_user_adds(here: Path, words: str, lines: list[str]) -> None:
    ours = "gpus-per-node: 4\nqueue: gpu\nmodules: [cuda]\nlaunch-options: [--mpi=pmix]\n"
    (here / "ours.yaml").write_text(f"system: slurm\n{ours}")
    made = script(words)
    assert [line for line in lines if line not in made] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_tells_its_source_and_sets_options_only(file: Path) -> None:
    assert file.read_text().startswith("# Written from its documentation, not run there.\n")
    site = yaml.safe_load(file.read_text())
    assert site["title"]
    assert "20" in site["page"] or "undated" in site["page"]
    # every site is in the table above
    assert any(f"--site {file.stem} " in f"{row.words} " for row in ROWS) or file.stem == "lonestar6"
    shape = {"gpus": "1"} if file.stem == "sophia" else {"nodes": "1"}
    given = {**shape, "time": "60", "site": file.stem}
    assert request(site["system"], ["my.py"], given).system == site["system"]


def test_list_of_sites() -> None:
    listed = script("--site", program=())
    assert all(file.stem in listed for file in FILES)
    assert "Running Jobs on Polaris, 2026-08-19" in listed
    assert "not run there" in listed


def test_options_win_over_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_SITE", "roihu")
    words = f"{ONE} -p gpularge --gpus-per-node 1 --cpus-per-node 9 --exclusive --directive=--gres=gpu:gh200:1,nvme:5"
    found = requested(words)
    expected = {"--partition=gpularge", "--cpus-per-task=9", "--exclusive", "--gres=gpu:gh200:1,nvme:5"}
    assert expected <= set(found)
    assert "--gres=gpu:gh200:1" not in found
    # the type of the site stays, and the option wins over the variable
    assert "--gres=gpu:gh200:2" in requested(f"{ONE} --gpus-per-node 2")
    assert "-l select=1:ncpus" in script(f"--site=casper {ONE}")
    with dask.config.set({"gpu-mpi.jobscript": {"queue": "mine"}}):
        assert "--partition=mine" in requested(ONE)
    monkeypatch.setenv("DASK_GPU_MPI_SITE", "casper")
    assert "Fix: name pbs, or unset DASK_GPU_MPI_SITE" in script(f"slurm {ONE}", rc=2)


def test_site_of_the_configuration_names_the_batch_system() -> None:
    with dask.config.set({"gpu-mpi.jobscript.site": "polaris"}):
        assert "#PBS -l select=1:" in script(ONE)


def test_site_whose_gpus_can_not_be_used_is_told() -> None:
    done = CliRunner().invoke(cli, ["jobscript", "--site", "lumi-g", *ONE.split(), "--", "my.py"])
    assert done.exit_code == 0
    assert "--site lumi-g: its GPUs are of AMD" in done.stderr


def test_values_of_a_file_stay_as_they_are_written(here: Path) -> None:
    """YAML 1.1 would make 83 of the account, and 5400 of the time."""
    text = "system: slurm\naccount: 0123\ntime: 1:30:00\nshared: true\ncpus-per-gpu: 16\nqueue:\nqos: null\n"
    (here / "ours.yaml").write_text(text)
    found = requested("--site ours.yaml -N 1 --gpus-per-node 4")
    assert {"--account=0123", "--time=01:30:00", "--cpus-per-task=64"} <= {*found}
    assert not [line for line in found if line.startswith(("--exclusive", "--partition", "--qos"))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read (not a regular file)"),  # a pipe: it would block until somebody writes into it
        ("queue: gpu\n", "the batch system is missing (expected system: one of slurm, pbs"),
        ("- 1\n", "the batch system is missing"),
        (
            "system: slrm\n",
            "unknown batch system 'slrm' (expected system: one of slurm, pbs, lsf, flux). Fix: system: slurm",
        ),
        (
            "system: [cobalt]\n",
            "unknown batch system ['cobalt'] (expected system: one of slurm, pbs, lsf, flux)",
        ),
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
def test_file_that_can_not_be_used(here: Path, text: str | None, message: str) -> None:
    if text is None:
        os.mkfifo(here / "bad.yaml")
    else:
        (here / "bad.yaml").write_text(text)
    assert message in script(f"--site bad.yaml {ONE}", rc=2)


@pytest.mark.parametrize("example", cli.commands["jobscript"].examples)  # type: ignore[attr-defined]
def test_the_examples_of_the_help_are_complete(example: str, here: Path) -> None:
    (here / "analysis.py").touch()
    words = shlex.split(example.replace(" --submit", ""))[1:]
    assert CliRunner().invoke(cli, words).exit_code == 0
