"""The first pages that a newcomer reads, run as they stand."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.jobs.clusters import COMMAND
from support.jobs.mpi import Mpi

FIRST = ("README.md", "docs/index.md", "docs/start.md")


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of the page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    """Our commands on the first pages that need neither a batch system nor other files than the script.

    Those of docs/site.md all need a batch system or GPUs.
    """
    lines = [
        line.partition("  #")[0].strip()
        for page in FIRST
        for block in blocks(page, "bash")
        for line in re.sub(r"\\\n\s*", "", block).splitlines()
    ]
    return sorted({line for line in lines if line.startswith("dask-gpu-mpi") and "--submit" not in line})


def without_comment(script: str) -> str:
    return script.removeprefix("# analysis.py\n")


def test_the_pages_have_commands_and_one_script() -> None:
    assert len(commands()) >= 5
    assert len({without_comment(blocks(page, "python")[0]) for page in FIRST}) == 1


@pytest.mark.parametrize("command", commands())
def test_a_command_runs_as_printed(mpirun: Mpi, tmp_path: Path, command: str) -> None:
    (tmp_path / "analysis.py").write_text(blocks("docs/start.md", "python")[0])
    (tmp_path / "env.sh").write_text("true\n")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = mpirun.run(["bash", "-c", command], None, env=env, cwd=tmp_path).check()
    if command.endswith("launch -n 4 analysis.py"):
        # the lines that the pages show
        printed = blocks("docs/start.md", "text")[0]
        assert printed == blocks("README.md", "text")[0]
        for line in printed.splitlines():
            pattern = re.sub(r"\d+(\\?\.\d+)?", r"[\\d.]+", re.escape(line).replace(r"\.\.\.", r"\S+"))
            assert re.search(f"^{pattern}$", done.stdout + done.stderr, re.MULTILINE), line


@pytest.mark.parametrize("number", [0, 1], ids=["many files", "one big array"])
def test_a_script_without_dask(mpirun: Mpi, tmp_path: Path, number: int) -> None:
    """The blocks of the page; NumPy is in CuPy's place."""
    numpy = pytest.importorskip("numpy")
    (tmp_path / "cupy.py").write_text("from numpy import *\nfrom numpy import linalg\n")
    (tmp_path / "data").mkdir()
    for i in range(3):
        numpy.save(tmp_path / "data" / f"{i}.npy", numpy.full(16, i))
    array = pytest.importorskip("dask.array")
    array.to_npy_stack(str(tmp_path / "stack"), array.ones((6, 4), chunks=(2, 4)))
    code = blocks("docs/your-script.md", "python")[number]
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH")}
    done = mpirun.run([*COMMAND, "launch", "-n", "2", "-c", code], None, cwd=tmp_path, env=env).check()
    assert done.stdout == ("sum of the norms: 12.0\n", "largest column mean: 1.0\n")[number]
