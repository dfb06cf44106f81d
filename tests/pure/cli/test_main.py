"""The command line as a whole, and what it says; its jobs: tests/mpi/test_main_job.py."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from dask_gpu_mpi.cli.main import cli, main
from dask_gpu_mpi.cli.options import of_job, read_texts, split_run
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import start as module
from support.mocks.inputs import parse_run


class Job:
    """What `run` does on a rank without a session, without a cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.options: Any = None
        self.given: dict[str, Any] = {}
        self.is_client = True
        monkeypatch.setattr(module, "prepare_process", lambda: self.did.append("prepare"))
        monkeypatch.setattr(module, "start", self.start)

    def start(self, read_options: Any, **given: Any) -> tuple[Any, Any]:
        self.given = given
        try:
            self.options = read_options()
        except InputError as error:
            self.options = error
        return SimpleNamespace(serve=lambda: 7, joined=SimpleNamespace(is_client=self.is_client)), None

    def run(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_no_word_at_all_is_a_request_for_help(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """On a rank it is a cluster without a script."""
    assert job.run() == 2
    assert (job.did, capsys.readouterr().err.count("Usage: ")) == ([], 1)


@pytest.mark.parametrize("variable", ["0", "none"])
@pytest.mark.parametrize("is_client", [True, False])
def test_a_cluster_without_a_script(
    job: Job,
    is_client: bool,
    variable: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", variable)
    job.is_client = is_client
    assert job.run() == 7
    assert (job.did, job.given) == (["prepare"], {"check": None, "has_client": False, "by_command": True})
    assert capsys.readouterr().err == ("dask_gpu_mpi: ended\n" if is_client else "")


def test_a_script_that_would_hide_dask(job: Job) -> None:
    """It is refused before Dask is imported, in the one report of all ranks."""
    job.run("dask.py")
    assert "dask.py' has the name of a library" in str(job.options)


def test_an_option_of_launch(job: Job) -> None:
    """On a rank it is an error, in the one report of all ranks."""
    job.run("run", "--launcher", "srun", "my.py")
    assert (
        "No such option '--launcher'. Fix: it is an option of launch: dask-gpu-mpi launch --launcher"
        in str(job.options)
    )


def test_the_clients_rank_checks_the_script(job: Job) -> None:
    job.run("--client-rank", "1", "plam", "argument")
    job.given["check"](0, job.options)
    with pytest.raises(InputError, match="'plam'.*'plan'"):
        job.given["check"](1, job.options)


@pytest.mark.parametrize("nodes", [["--nodes", "2"], ["--nodes=2"]])
def test_a_plan_of_hypothetical_nodes_needs_no_ranks_to_refuse_options(
    job: Job, nodes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run("plan", *nodes, "--protocol", "ucx") == 2
    assert capsys.readouterr().err == "dask_gpu_mpi: error: command line: No such option '--protocol'.\n"
    assert job.did == []
    job.run("plan", "--protocol", "ucx")  # of the ranks that there are one reports
    assert job.did == ["prepare"]


@pytest.mark.parametrize("command", ["jobscript", "launch", "top"])
def test_what_click_refuses_on_a_login_node(
    job: Job, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run(command, "--noodles") == 2
    assert (job.did, capsys.readouterr().err.count("dask_gpu_mpi: error: command line: ")) == ([], 1)
    assert job.run(command, "--help") == 0


def test_an_interrupted_command(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise click.Abort

    monkeypatch.setattr(cli, "main", interrupted)
    assert job.run("check") == 130  # 128 + SIGINT
    assert capsys.readouterr().err == "dask_gpu_mpi: error: SIGINT came before the start\n"


def test_a_command_that_a_script_of_a_job_starts_is_not_its_cluster(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_CONFIG", "/proc/1/fd/99")
    monkeypatch.setenv("DGM_DASK_BEFORE", '["/proc/1/fd/99", {"DASK_CONFIG": "/mine"}]')
    assert job.run("jobscript", "--help") == 0
    assert os.environ["DASK_CONFIG"] == "/mine"
    assert "DGM_DASK_BEFORE" not in os.environ


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (["my.py", "--help"], ["run", "my.py", "--help"]),
        (["-m", "module"], ["run", "-m", "module"]),
        (["--version", "x"], ["--version", "x"]),
        (["plan", "--nodes", "2"], ["plan", "--nodes", "2"]),
    ],
)
def test_first_word_decides_the_command(
    monkeypatch: pytest.MonkeyPatch, given: list[str], parsed: list[str]
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(click.Group, "parse_args", lambda self, ctx, args: seen.append(args) or [])
    cli.parse_args(click.Context(cli), given)
    assert seen == [parsed]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-m mod --nthreads 3 -c", "-m mod --nthreads 3 -c"),
        ("-mmod -x", "-m mod -x"),
        ("-cpass --help", "-c pass --help"),
        ("--no-dashboard --nthreads=2 -m -c", "-m -c"),
        ("--nthreads 2 -c pass", "-c pass"),
        ("--name -m s.py -m x", "s.py -m x"),  # the value of an option
        ("-- -mmod", "-mmod"),
        ("s.py -m mod", "s.py -m mod"),
    ],
)
def test_options_end_at_a_module_or_code(arguments: str, words: str) -> None:
    assert parse_run(arguments.split())["program"] == tuple(words.split())


def test_a_module_that_is_missing() -> None:
    with pytest.raises(click.ClickException, match="Option '-m' requires an argument"):
        parse_run(["--nthreads", "2", "-m"])


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ("--no-scheduler tcp://h1:8786 script.py", "tcp://h1:8786"),
        ("--no-scheduler h1:8786 script.py", "h1:8786"),
        ("tcp://h1:8786", ""),  # a scheduler of our own: it is a script, whatever its name
        ("--no-scheduler --scheduler-file s.json h1:8786", ""),
        ("--no-scheduler --scheduler-address tcp://h2:1 h1:8786", ""),
    ],
)
def test_dask_mpis_way_to_name_a_scheduler(arguments: str, address: str) -> None:
    given = parse_run(arguments.split())
    given, program = split_run(given, given.pop("program"))
    assert program == (arguments.split()[-1],)
    assert not address or read_texts(given).scheduler_address == address


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("jobscript slurm --gpus-per-node 0 my.py --epochs 3", "No such option '--epochs'. Fix: `--` before the script"),
        ("jobscript slurm --gres gpu:4 -- my.py", "'--nodes'?) Fix: that, or --directive=--gres=VALUE for an option of the"),
        ("jobscript slurm -J x -- my.py", "No such option '-J'. Fix: --directive='-J VALUE' for an option of the batch"),
        ("jobscript slurm --container x -- my.py", "--container is an option of launch. Fix: put it behind --, before"),
        ("top --interval slow", "'slow' is not a number of 0.5 to 3600"),
        ("jobscript slurm -n 8 -- my.py", "-n is an option of launch. Fix: --nodes and --ranks-per-node"),
        ("jobscript pbs --job-name x -- my.py", "No such option '--job-name'. Fix: --directive with an option of qsub"),
        ("top -n 2", "No such option '-n'. Fix: it is an option of launch: dask-gpu-mpi launch -n N SCRIPT"),
        ("launch --rmm-pool-size 0.8 my.py", "'--rmm-pool-size'. Fix: --worker-options '{\"rmm_pool_size\": VALUE}'"),
        ("launch --device-memory-limit 1GB my.py", "Fix: --worker-options '{\"device_memory_limit\": VALUE}'"),
        ("top s.json", "extra argument (s.json). Fix: --scheduler-file FILE"),
        ("top --once", "no cluster found"),
        ("top --json --scheduler-file none", "no scheduler file"),
        ("top --scheduler-file none", "--once or --json"),  # no terminal
        ("plan --nodes 1 analysis.py", "extra argument (analysis.py). Fix: leave the script out"),
        ("plan --nodes 1 --memory-per-node 512", "--memory-per-node '512': 512 bytes (expected a size such as 64G)"),
        ("plan --nodes 1 --memory-per-node 1x", "command line: --memory-per-node '1x': "),
        ("plan --nodes 1 --nthreads x", "--nthreads"),
        ("plan --nodes 1 --layout exclusive --ranks-per-node 1", "at least 3 ranks"),
        ("plan --nodes 1 --worker-options '{\"no_such\": 1}'", "no_such"),
        ("plan --gpus 8 --nodes 2", "--gpus with --nodes (expected one of them)"),
        ("plan --gpus-per-node 4", "command line: --gpus-per-node without --nodes (expected --nodes N"),
        ("plan --nodes 1 --svg plan.png", "--svg 'plan.png' (expected a name that ends with .svg)"),
        ("plan --nodes 1 --svg none/plan.svg", "--svg 'none/plan.svg' can't be written: No such file or directory. Fix: "),
        ("launch --worker-gpu 1 my.py", "No such option '--worker-gpu'. Did you mean '--gpus-per-worker'?"),
        ("launch --nodes=2 my.py", "No such option '--nodes'. A job runs on all its nodes and GPUs. Fix: leave it out; jobs"),
        ("launch --gpus 2 my.py", "A job runs on all its nodes and GPUs. Fix: leave it out, or set CUDA_VISIBLE_DEVICES"),
        ("top --lifetime 3", "No such option '--lifetime'.\n"),  # it starts no workers
        ("launch -n 0 my.py", "'-n' / '--ranks': 0 is not a whole number of 1 to 1000000"),
        ("launch --check -np 3 my.py", "No such option '-np'. Fix: -n 3"),
        ("launch -np", "No such option '-np'. Fix: -n N"),
        ("launch --hosts h1:3,h2 -n 5 my.py", "-n 5 with --hosts h1:3,h2, which has 4 ranks. Fix: "),
        ("launch --np 4 my.py", "No such option '--np'. Fix: -n"),
        ("launch -n four my.py", "'four' is not a whole number of 1 to 1000000"),
        ("launch -n 4 --ranks-per-node 2 my.py", "launch: -n 4 with --ranks-per-node 2 (expected one of them)"),
        ("launch --hosts none.invalid my.py", "--hosts: 'none.invalid' has no address, and there is no such file"),
        ("launch --hosts h1:x my.py", "--hosts h1:x: invalid node 'h1:x'"),
        ("launch --launcher srun my.py", "--launcher srun: command srun not found"),
        ("launch --launcher-option=mem-bind=local my.py", "is not an option of a launcher (expected one that begins"),
        ('launch "--launcher-option=--a \'b" my.py', "--launcher-option=--a 'b: No closing quotation"),
        ("launch --container-runtime shifter my.py", "--container-runtime without --container. Fix: add"),
        ("launch --container-mount /usr my.py", "--container-mount without --container. Fix: add"),
        ("launch --stage env.tar --container image.sif my.py", "--stage with --container"),
        ("launch --stage none.tar my.py", "--stage none.tar: can't be read (No such file or directory)"),
        ("launch --launcher-command ibrun -n 2 x", "-n with --launcher-command: ibrun starts the ranks that the job has. Fix:"),
        ("launch --launcher-command ibrun --launcher srun x", "--launcher with --launcher-command"),
        ("launch --launcher-command ibrun --mpi pmix x", "--mpi with --launcher-command"),
        ("launch --launcher-command ibrun --stage x.tar x", "--stage with --launcher-command"),
        ("launch --launcher-command ibrun x", "launch: --launcher-command ibrun: not found in PATH. Fix: load its module"),
    ],
)  # fmt: skip
def test_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/gone")
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(words))
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith("dask_gpu_mpi: error: ")
    assert message in f"{line}\n"


@pytest.mark.parametrize(
    ("words", "text", "warned"),
    [
        (["--report=r.html", "--input", "x"], "print(1)", "--report after the script"),
        (["--ranks", "2", "--nthreads", "4"], "print(1)", "--ranks, --nthreads after the script"),
        (["--scheduler-file", "f"], "parser.add_argument('--scheduler_file')", ""),
        (["--report"], None, ""),
    ],
)
def test_options_behind_the_script(words: list[str], text: str | None, warned: str, tmp_path: Path) -> None:
    script = tmp_path / "my.py"
    if text is not None:
        script.write_text(text)
    warnings = of_job({}, [str(script), *words], cli.commands["launch"]).warnings
    assert [each.found.partition(" goes")[0] for each in warnings] == ([warned] if warned else [])
