"""Scripts of jobs: files that a linter reads, put together as one text for each job."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3]
IMPORT = re.compile(r"^from (support\.\S+\.scripts\.\w+) import .*\n", re.MULTILINE)


def script(name: str) -> str:
    """Text of a script, by its path below tests/."""
    return expanded((TESTS / name).read_text())


def expanded(text: str) -> str:
    """A text, with other scripts in the place of what it imports of them.

    Dask sends the functions of ``__main__`` by value, and needs no module for them on other hosts.
    """
    return IMPORT.sub(lambda found: script(found[1].replace(".", "/") + ".py"), text)
