"""What the pages show can be used as it stands: every block of code is parsed, every command of ours as the program parses it."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dask_gpu_mpi.cli.main import cli
from support import PAGES, ROOT

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
            for start in range(len(words) - len(name) + 1):
                if words[start : start + len(name)] == name:
                    end = next(
                        (i for i in range(start, len(words)) if words[i] in ("&&", "||", "|", ">", ";")),
                        len(words),
                    )
                    found.append(words[start + len(name) : end])
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
    from dask_gpu_mpi.options.model import Options
    from dask_gpu_mpi.plan.planner import make_plan
    from dask_gpu_mpi.plan.synthetic import hypothetical_job

    plan = make_plan(hypothetical_job(1, 1, 1, "all", 4, 1 << 36), Options()).as_json()
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    names = {
        name.rpartition(".")[2]
        for name in re.findall(r"`([\w.\[\]]+)`", "".join(re.findall(r"^\|([^|]*)\|", page, re.M)))
    }
    keys = {*plan, *plan["hosts"][0], *plan["workers"][0]}
    assert {name.removesuffix("[]") for name in keys} - names == set()
