"""The page of the gallery shows the scripts that there are, each with its command and its output."""

from __future__ import annotations

import pytest

from support import ROOT
from support.jobs.gallery import EXAMPLES, sections

FOLDER = ROOT / "examples"
SCRIPTS = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*") if "__pycache__" not in path.parts
)


def test_every_script_is_on_the_page_and_every_one_there_exists() -> None:
    assert sorted(sections()) == SCRIPTS


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_is_that_of_the_test(name: str) -> None:
    options = [f"'{option}'" if " " in option else option for option in EXAMPLES[name].options]
    command = " ".join(["dask-gpu-mpi launch -n 2", *options, f"examples/{name}.py"])
    assert command in sections()[f"{name}.py"]
    assert command in (FOLDER / f"{name}.py").read_text(encoding="utf-8")
