"""How messages write a value, and which name they propose in place of an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ELSEWHERE", "nearest", "show", "suggest"]

#: What Coiled and Dask's LocalCluster call an option, and ours.
ELSEWHERE = {
    "worker_gpu": "gpus_per_worker",
    "worker_memory": "memory_limit",
    "worker_cpu": "nthreads",
    "threads_per_worker": "nthreads",
}


def show(value: Any) -> str:
    """Write a value into a message: one line, and not a long one.

    >>> show("a value"), show("x" * 90)
    ("'a value'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx ... xxxxxxxxxxxxxx'")
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, or what is nested as deeply
        text = f"<{type(value).__name__} that is too large to show>"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that is nearest to an unknown one, whatever its case and its dashes; None: none is near.

    >>> nearest("Memory-Limits", ["memory_limit", "layout"]), nearest("x", ["tls", "tcp"])
    ('memory_limit', None)
    >>> nearest("worker_memory", ["memory_limit", "worker_class"])
    'memory_limit'
    """
    names = {_folded(each): each for each in valid}
    if (ours := ELSEWHERE.get(_folded(name))) in names:
        return names[ours]
    near = difflib.get_close_matches(_folded(name), sorted(names), 1)
    return names[near[0]] if near else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def suggest(name: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """The end of a message about an unknown `name`: the nearest valid one, or all if they are few, or nothing.

    `spell` is how a valid name is written where the user will read it.

    >>> suggest("nthread", ["nthreads", "layout"]), suggest("x", ["tls", "tcp"])
    ("; did you mean 'nthreads'?", '; valid: tcp, tls')
    """
    names = sorted(set(valid))
    if near := nearest(name, names):
        return f"; did you mean {spell(near)!r}?"
    return f"; valid: {', '.join(map(spell, names))}" if 0 < len(names) <= 8 else ""
