"""Help that fits a screen, and what a shell completes: as users see both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.cli.options import TOPICS
from dask_gpu_mpi.options.model import OPTIONS

COMMANDS = list(cli.commands)


def help_text(*words: str) -> str:
    done = CliRunner().invoke(cli, [*words])
    assert done.exit_code == 0
    return done.output


def test_the_first_page_fits_24_lines_and_names_every_command() -> None:
    lines = help_text("--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert {name for name in COMMANDS if any(line.startswith(f"  {name} ") for line in lines)} == set(
        COMMANDS
    )
    assert not any(line.endswith("...") for line in lines if line.startswith("  "))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_help_all_has_every_option(command: str) -> None:
    short = help_text(command, "--help").splitlines()
    # without that option the first help has them all
    full = (
        help_text(command, "--help-all").splitlines()
        if any("--help-all" in line for line in short)
        else short
    )
    assert len(short) <= 24
    assert max(map(len, [*short, *full])) <= 80
    assert "Examples:" in short
    flags = {
        parameter.opts[0]: sum(_shows(line, parameter) for line in full)
        for parameter in cli.commands[command].params
        if isinstance(parameter, click.Option)
    }
    assert flags == dict.fromkeys(flags, 1)


def _shows(line: str, option: click.Option) -> bool:
    """Whether a line of help is the first one of this option."""
    words = line.replace(",", " ").split()
    return line.startswith("  -") and words[:1] == [
        min(option.opts, key=lambda flag: (flag.startswith("--"), 0))
    ]


def test_every_option_has_one_topic() -> None:
    topics = [name for names in TOPICS.values() for name in names]
    assert sorted(topics) == sorted(option.name for option in OPTIONS.values() if option.cli)


@pytest.mark.parametrize("line", [["-m", "dask_gpu_mpi"], ["-m", "dask", "gpu-mpi"]], ids=["ours", "dask"])
def test_version_names_the_program(line: list[str]) -> None:
    done = subprocess.run([sys.executable, *line, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"dask-gpu-mpi, version {version('dask-gpu-mpi')}\n"


def completed(folder: Path, line: str) -> list[str]:
    """What bash offers at the end of this line, by the function that users source."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash")
    words = line.split(" ")
    (folder / "dask-gpu-mpi").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dask_gpu_mpi "$@"\n')
    (folder / "dask-gpu-mpi").chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
compopt() {{ echo "compopt $2"; }}  # outside of a completion it is refused
source <(_DASK_GPU_MPI_COMPLETE=bash_source dask-gpu-mpi)
COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
_dask_gpu_mpi_completion dask-gpu-mpi '{words[-1]}' '{words[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [bash, "--norc", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")


FILES = "compopt default"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dask-gpu-mpi ", {*COMMANDS, FILES}),
        ("dask-gpu-mpi la", {"launch"}),
        ("dask-gpu-mpi --nth", {"--nthreads"}),
        ("dask-gpu-mpi --protocol t", {"tls", "tcp"}),
        ("dask-gpu-mpi run --scheduler-file ", {FILES}),
        ("dask-gpu-mpi my", {FILES}),
        ("dask-gpu-mpi --nthreads 2 my", {FILES}),
        ("dask-gpu-mpi run -m ", {FILES}),
        ("dask-gpu-mpi launch --dry", {"--dry-run"}),
        ("dask-gpu-mpi check --expect", {"--expect-gpus"}),
        ("dask-gpu-mpi plan --gpus-per-n", {"--gpus-per-node"}),
        ("dask-gpu-mpi jobscript s", {"slurm"}),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    assert expected <= set(completed(tmp_path, line))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_what_is_to_be_sourced(tmp_path: Path, shell: str) -> None:
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"no {shell}")
    environ = {**os.environ, "_DASK_GPU_MPI_COMPLETE": f"{shell}_source"}
    text = subprocess.run(
        [sys.executable, "-m", "dask_gpu_mpi"], env=environ, capture_output=True, text=True, timeout=60
    ).stdout
    assert "_DASK_GPU_MPI_COMPLETE" in text
    (tmp_path / "completion").write_text(text)
    done = subprocess.run(
        [found, "-n", str(tmp_path / "completion")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
