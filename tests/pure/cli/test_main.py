"""The command line as a whole; its jobs: tests/mpi/test_main_job.py."""

from __future__ import annotations

import os
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dask_gpu_mpi.cli.main import cli, main
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import program as script
from dask_gpu_mpi.job import start as module
from dask_gpu_mpi.job.program import Program
from dask_gpu_mpi.options.model import Options


class Job:
    """What `run` does with a cluster, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.options: Any = None
        self.given: dict[str, Any] = {}
        self.raises: Exception | None = None
        self.session: Any = None
        self.is_client = True
        monkeypatch.setattr(module, "prepare_process", lambda: self.did.append("prepare"))
        monkeypatch.setattr(module, "start", self.start)
        monkeypatch.setattr(
            Program, "prepare", lambda it: self.did.append(f"argv {it.text} {list(it.arguments)}")
        )
        monkeypatch.setattr(script, "run_script", lambda it: self.did.append(f"run {it.text}"))

    def start(self, read_options: Any, **given: Any) -> tuple[Any, Any]:
        self.given = given
        try:
            self.options = read_options()
        except InputError as error:
            self.options = error
        if self.raises is not None:
            raise self.raises
        member = SimpleNamespace(
            serve=lambda: 7, joined=SimpleNamespace(start=SimpleNamespace(is_client=self.is_client))
        )
        return member, self.session

    def run(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_commands() -> None:
    assert list(cli.commands) == ["run", "launch", "jobscript", "plan", "check", "top"]
    assert CliRunner().invoke(cli, ["--version"]).output.endswith(f"version {version('dask-gpu-mpi')}\n")
    assert "Usage" in CliRunner().invoke(cli, ["--help"]).output


@pytest.mark.parametrize("command", [(), ("run",)])
def test_the_client_runs_the_script(job: Job, command: tuple[str, ...]) -> None:
    job.session = object()
    assert job.run(*command, "--nthreads", "2", "my.py", "--nthreads", "3") == 0
    assert job.did == ["prepare", "argv my.py ['--nthreads', '3']", "run my.py"]
    assert (job.options.nthreads, job.given["has_client"]) == (2, True)


@pytest.mark.parametrize("option", ["-m", "-c"])
def test_the_client_runs_a_module_or_code(job: Job, option: str) -> None:
    job.session = object()
    job.run("--nthreads", "2", option, "text", "-m", "--nthreads", "3")
    assert job.did == ["prepare", "argv text ['-m', '--nthreads', '3']", "run text"]
    assert job.options.nthreads == 2


def test_other_ranks_serve(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.run("my.py") == 7
    assert "run my.py" not in job.did
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_client", [True, False])
def test_a_cluster_without_a_script(job: Job, is_client: bool, capsys: pytest.CaptureFixture[str]) -> None:
    job.is_client = is_client
    assert job.run() == 7
    assert (job.did, job.given) == (["prepare"], {"check": None, "has_client": False, "by_command": True})
    assert capsys.readouterr().err == ("dask_gpu_mpi: ended\n" if is_client else "")


def test_the_clients_rank_checks_the_script(job: Job) -> None:
    job.run("--client-rank", "1", "plam", "argument")
    job.given["check"](0, job.options)
    with pytest.raises(InputError, match="'plam'.*'plan'"):
        job.given["check"](1, job.options)


def test_errors_are_reported_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.raises = StartupError("no response")
    assert job.run("my.py") == 1
    assert capsys.readouterr().err == "dask_gpu_mpi: error: no response\n"


def test_what_click_refuses_is_reported_for_all_ranks(job: Job) -> None:
    job.run("--layuot", "shared", "my.py")
    assert isinstance(job.options, InputError)
    assert "command line: " in str(job.options)
    assert "--layuot" in str(job.options)
    assert job.given == {"check": None, "has_client": False, "by_command": True}
    job.run("--layout", "shard", "my.py")
    assert "shard" in str(job.options)
    assert not isinstance(job.options, Options)


@pytest.mark.parametrize("nodes", [["--nodes", "2"], ["--nodes=2"]])
def test_a_plan_of_hypothetical_nodes_needs_no_ranks_to_refuse_options(
    job: Job, nodes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run("plan", *nodes, "--protocol", "ucx") == 2
    assert capsys.readouterr().err == "dask_gpu_mpi: error: command line: No such option '--protocol'.\n"
    assert job.did == []
    job.run("plan", "--protocol", "ucx")  # of the ranks that there are one reports
    assert job.did == ["prepare"]


def test_what_click_refuses_on_a_login_node(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.run("jobscript", "--noodles") == 2
    assert (job.did, capsys.readouterr().err.count("dask_gpu_mpi: error: command line: ")) == ([], 1)
    assert job.run("jobscript", "--help") == 0


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
        ([], ["run"]),
        (["my.py", "--help"], ["run", "my.py", "--help"]),
        (["my.py", "--version"], ["run", "my.py", "--version"]),
        (["-m", "module"], ["run", "-m", "module"]),
        (["--help"], ["--help"]),
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
