"""The page of the gallery shows the scripts that there are, each with its command and its output."""

from __future__ import annotations

import re

import pytest

from support import ROOT
from support.jobs.gallery import EXAMPLES, PAGE, right, sections

FOLDER = ROOT / "examples"
SCRIPTS = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*") if "__pycache__" not in path.parts
)


def test_every_script_is_on_the_page_and_every_one_there_exists() -> None:
    assert sorted(sections()) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short(script: str) -> None:
    lines = (FOLDER / script).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (137 if script == "digits_pca.py" else 80)


@pytest.mark.parametrize("name", [*EXAMPLES, "interactive"])
def test_the_line_that_says_right_is_one_that_the_script_prints(name: str) -> None:
    """Its words; tests/mpi/test_gallery.py compares the whole line with that of a real job."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    (printed,) = re.findall(r'print\(f"(right: [^"]*)"\)', source)
    pattern = ".*".join(re.escape(words) for words in re.split(r"\{[^}]*\}", printed))
    (shown,) = right(sections()[f"{name}.py"])
    assert re.fullmatch(pattern, shown)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_is_that_of_the_test(name: str) -> None:
    options = [f"'{option}'" if " " in option else option for option in EXAMPLES[name].options]
    command = " ".join(["dask-gpu-mpi launch -n 2", *options, f"examples/{name}.py"])
    assert command in sections()[f"{name}.py"]
    assert command in (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def test_the_page_has_no_code_of_its_own() -> None:
    assert "```python" not in PAGE.read_text(encoding="utf-8").replace("```python\nimport coiled", "")
