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

from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.cli.options import TOPICS
from dask_gpu_mpi.options.model import OPTIONS
from support.mocks.inputs import command as help_of

COMMANDS = list(cli.commands)


def test_the_first_page_fits_24_lines_and_names_every_command() -> None:
    lines = help_of("--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert not any(line.endswith("...") for line in lines if line.startswith("  "))
    topics = [name for names in TOPICS.values() for name in names]
    assert sorted(topics) == sorted(option.name for option in OPTIONS.values() if option.cli)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_help_all_has_every_option(command: str) -> None:
    short = help_of(command, "--help").splitlines()
    # without that option it shows what `--help` shows
    if not any("--help-all" in line for line in short):
        assert help_of(command, "--help-all").splitlines() == short
    full = help_of(command, "--help-all").splitlines()
    assert len(short) <= 24
    assert max(map(len, [*short, *full])) <= 80
    assert "Examples:" in short
    for option in cli.commands[command].params:
        if isinstance(option, click.Option) and not option.hidden:
            first = min(option.opts, key=lambda flag: flag.startswith("--"))
            shown = [
                line for line in full if line.startswith("  -") and line.replace(",", " ").split()[0] == first
            ]
            assert len(shown) == 1, first


@pytest.mark.parametrize("line", [["-m", "dask_gpu_mpi"], ["-m", "dask", "gpu-mpi"]], ids=["ours", "dask"])
def test_version_names_the_program(line: list[str]) -> None:
    done = subprocess.run([sys.executable, *line, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"dask-gpu-mpi, version {version('dask-gpu-mpi')}\n"


FILES = "compopt default"
#: What bash is to offer, at least, at the end of each line.
COMPLETIONS = {
    "dask-gpu-mpi ": {*COMMANDS, FILES},
    "dask-gpu-mpi la": {"launch"},
    "dask-gpu-mpi --nth": {"--nthreads"},
    "dask-gpu-mpi --protocol t": {"tls", "tcp"},
    "dask-gpu-mpi run --scheduler-file ": {FILES},
    "dask-gpu-mpi --nthreads 2 my": {FILES},
    "dask-gpu-mpi run -m ": {FILES},
    "dask-gpu-mpi jobscript s": {"slurm"},
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(tmp_path: Path) -> None:
    """By the function that users source."""
    program = tmp_path / "dask-gpu-mpi"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dask_gpu_mpi "$@"\n')
    program.chmod(0o755)
    script = """
compopt() { echo "compopt $2"; }  # outside of a completion it is refused
source <(_DASK_GPU_MPI_COMPLETE=bash_source dask-gpu-mpi)
while IFS= read -r line; do
    IFS=' ' read -ra COMP_WORDS <<< "$line"
    [[ $line != *' ' ]] || COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _dask_gpu_mpi_completion dask-gpu-mpi "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" < /dev/null
    printf '%s\\n' "${COMPREPLY[@]}" ===
done
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        input="".join(f"{line}\n" for line in COMPLETIONS),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *offered, end = done.stdout.split("===\n")
    assert end == ""
    for (line, expected), found in zip(COMPLETIONS.items(), offered, strict=True):
        assert expected <= set(found.split("\n")), line
