"""The pages and docstrings: links lead somewhere, names of modules are right, and examples can be used as they stand."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

import dask_gpu_mpi
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.planner import make_plan
from support import PAGES, ROOT
from support.jobs.gallery import EXAMPLES, sections

PACKAGE = ROOT / "dask_gpu_mpi"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`(?!\]\()", "", text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["options", "performance"])
def test_generated_pages_are_current(page: str) -> None:
    command = [sys.executable, ROOT / "docs" / f"make_{page}.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    """And lead where they say: ``[gpus.md](transports.md)`` would be a mistake."""
    text = without_code(page.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        known = file.exists() and (
            not anchor or file.suffix != ".md" or anchor in anchors(file.read_text(encoding="utf-8"))
        )
        broken += [] if known else [target]
    links = re.findall(r"\[((?:docs/)?[\w-]+\.md)\]\(([^)#\s]+)", text)
    assert broken + [link for link in links if Path(link[0]).name != Path(link[1]).name] == []


def test_the_design_has_every_package_and_modules_that_exist() -> None:
    page = (ROOT / "contributing" / "design.md").read_text()
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    named = re.findall(rf"`((?:{'|'.join(packages)})/\w+)`", page)
    assert len(named) > 20
    assert [name for name in named if not (PACKAGE / f"{name}.py").is_file()] == []
    assert set(re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)) == packages


def test_the_readme_has_the_measured_figure() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    row = re.search(
        r"^\| ready, one worker on each of 2 GPUs \| s .*\| \*\*([\d.]+)\*\* \| ([\d.]+) \|",
        page,
        re.MULTILINE,
    )
    assert row is not None
    sentence = f"A cluster of two H200 is ready after {row[1]} s, with dask-mpi after {row[2]} s"
    assert sentence in (ROOT / "README.md").read_text()


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    """A placeholder, until there is a public one."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == address
    for page in ("README.md", "docs/install.md"):
        assert f"git clone {address}" in (ROOT / page).read_text()


# -- the gallery has the scripts that there are, each with its command and its output

EXAMPLE_FILES = {path for path in (ROOT / "examples").rglob("*.*") if "__pycache__" not in path.parts}


def test_every_script_is_in_the_gallery_and_every_one_there_exists() -> None:
    assert {ROOT / "examples" / name for name in sections()} == EXAMPLE_FILES


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_of_the_gallery_is_that_of_its_test(name: str) -> None:
    command = shlex.join(
        ["dask-gpu-mpi", "launch", "-n", "2", *EXAMPLES[name].options, f"examples/{name}.py"]
    )
    assert command in sections()[f"{name}.py"]
    assert command in (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


# -- blocks of code

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return [(language, text) for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_can_be_parsed(page: Path) -> None:
    for language, text in blocks(page):
        match language:
            case "python":
                ast.parse(text)
            case "json":
                json.loads(text)
            case "yaml":
                yaml.safe_load(text)
            case "bash" | "sh":
                done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
                assert done.returncode == 0, done.stderr
            case other:
                assert other in {"console", "text", "toctree", "ini"}, f"{page.name}: a block of {other}"


NAMES = (["dask-gpu-mpi"], ["dask", "gpu-mpi"], ["python", "-m", "dask_gpu_mpi"])


def commands(text: str) -> list[list[str]]:
    """The words behind the program's name, for each line of a block that calls it, by a launcher or not."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        for name in NAMES:
            starts = [i for i in range(len(words)) if words[i : i + len(name)] == name]
            rests = [words[start + len(name) :] for start in starts]
            found += [
                [*takewhile(lambda word: word not in ("&&", "||", "|", ">", ";"), rest)] for rest in rests
            ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_our_commands_are_those_of_the_program(page: Path) -> None:
    """Parsed as the program parses them; nothing is run."""
    for language, text in blocks(page):
        for words in commands(text) if language in ("bash", "sh") else []:
            parse(words)


def parse(words: list[str]) -> None:
    words = [word for word in words if word not in ("[OPTIONS]", "...")]
    if not words or words[0] in ("--help", "--version"):
        return
    command: Any = cli.commands[words[0]] if words[0] in cli.commands else cli.commands["run"]
    arguments = words[1:] if words[0] in cli.commands else words
    with command.make_context("dask-gpu-mpi", list(arguments)):
        pass


def test_the_json_of_the_plan_is_the_one_of_the_page() -> None:
    plan = make_plan(hypothetical_job(1, 1, 1, "all", 4, 1 << 36), Options()).as_json()
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    names = {
        name.rpartition(".")[2]
        for name in re.findall(r"`([\w.\[\]]+)`", "".join(re.findall(r"^\|([^|]*)\|", page, re.M)))
    }
    keys = {*plan, *plan["hosts"][0], *plan["workers"][0]}
    assert {name.removesuffix("[]") for name in keys} - names == set()


# -- docstrings, and names of modules in texts


def has_examples(text: str) -> bool:
    """Whether there is one that is not skipped; those that need a cluster are, and tests/mpi has what they show."""
    return any(">>> " in line and "+SKIP" not in line for line in text.splitlines())


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if has_examples(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0, capsys.readouterr().out


FOLDERS = ("dask_gpu_mpi", "tests", "benchmarks", "docs", "examples", "ci")


def test_names_of_modules_in_texts_are_those_of_modules() -> None:
    """In imports, but in strings and comments as well, which no tool looks at when a module moves."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    known = modules | {module.partition(".")[0] for module in modules} | set(dask_gpu_mpi.__all__)
    unknown = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"\bdask_gpu_mpi\.([a-z]\w*(?:\.[a-z]\w*)?)", text)
        for imported in re.findall(r"\bfrom dask_gpu_mpi import ([\w, ]+)", text):
            named += [name for name in re.findall(r"\w+", imported.partition(" as ")[0]) if name.islower()]
        for name in named:
            package = name.partition(".")[0]
            if name not in known and (package not in known or (PACKAGE / package).is_dir()):
                unknown.append(f"{path.relative_to(ROOT)}: dask_gpu_mpi.{name}")
    assert unknown == []
