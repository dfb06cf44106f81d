from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import PAGES, ROOT

sys.path.insert(0, str(ROOT / "docs"))


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`(?!\]\()", "", text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ci_commands(text: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<![\w./-])(?:\./)?(ci/[\w./-]+)", "\n".join(blocks))


def test_page_of_options_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_options.py", "--check"], capture_output=True, text=True
    )
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


def test_the_site_has_every_page() -> None:
    """In the contents of docs/index.md, or below a page there; what is not there is found by nobody."""
    docs = ROOT / "docs"
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent == docs)
    trees = "\n".join(re.findall(r"```{toctree}\n(.*?)```", text, re.S))
    listed = {"index", *map(str.strip, trees.splitlines())}
    pages = {page.relative_to(docs).with_suffix("").as_posix() for page in PAGES if docs in page.parents}
    assert pages - listed == set()


def test_ci_commands_of_the_readme_exist() -> None:
    commands = ci_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"ci/demo.sh", "ci/test.sh"} <= set(commands)
    assert [command for command in commands if not (ROOT / command).is_file()] == []


def test_the_design_has_every_package_and_modules_that_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    packages = {path.parent.name for path in (ROOT / "dask_gpu_mpi").glob("*/__init__.py")}
    named = re.findall(rf"`((?:{'|'.join(packages)})/\w+)`", page)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "dask_gpu_mpi" / f"{name}.py").is_file()] == []
    assert set(re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)) == packages
