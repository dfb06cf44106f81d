"""The order of names in which numbers count as numbers."""

from __future__ import annotations

import re

__all__ = ["natural"]


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A name as what it is sorted by.

    >>> sorted(["10-0", "9-cpu-0", "9-0", "join-10", "join-9"], key=natural)
    ['9-0', '9-cpu-0', '10-0', 'join-9', 'join-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
