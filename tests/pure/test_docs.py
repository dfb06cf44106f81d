from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import PAGES, ROOT

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
    page = (ROOT / "docs" / "design.md").read_text()
    packages = {path.parent.name for path in (ROOT / "dask_gpu_mpi").glob("*/__init__.py")}
    named = re.findall(rf"`((?:{'|'.join(packages)})/\w+)`", page)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "dask_gpu_mpi" / f"{name}.py").is_file()] == []
    assert set(re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)) == packages
