"""Scripts of jobs: files that a linter reads, put together as one text for each job."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["script"]

TESTS = Path(__file__).resolve().parents[3]
IMPORT = re.compile(r"^from (support\.\S+\.scripts\.\w+) import .*\n", re.MULTILINE)


def script(name: str) -> str:
    """Text of a script, by its path below tests/.

    Text stands in the place of what it imports of other scripts: Dask sends the functions of ``__main__`` by value, and needs no
    module for them on other hosts.
    """
    text = (TESTS / name).read_text()
    return IMPORT.sub(lambda found: script(found[1].replace(".", "/") + ".py"), text)
