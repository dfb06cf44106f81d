"""What of a snapshot `top` shows: order, node, fold, scroll position; and the keys that change these. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .snapshot import Row

__all__ = ["SORTS", "Page", "View", "folded", "keys_of", "page_of", "press", "share", "troubles"]


def share(used: int | None, total: int | None) -> float | None:
    """A part of 1.

    >>> share(1, 4), share(1, None)
    (0.25, None)
    """
    return None if used is None or not total else used / total


#: By what rows can be sorted, in the order of the key `s`; the first is the plan's order. The largest figure comes first.
SORTS: dict[str, Callable[[Row], float | None] | None] = {
    "node": None,
    "GPU use": lambda row: row.gpu_use,
    "GPU memory": lambda row: row.gpu_memory,
    "RMM": lambda row: row.rmm_used,
    "host memory": lambda row: row.host_memory,
    "running": lambda row: row.running,
    "waiting": lambda row: row.waiting,
    "in": lambda row: row.received_rate,
    "out": lambda row: row.sent_rate,
    "spilled": lambda row: row.spilled,
}
#: What terminals send for keys that are no characters.
_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_SEQUENCES |= {"\x1b[5~": "page up", "\x1b[6~": "page down"}


@dataclass
class View:
    """The state that keys change."""

    #: A key of `SORTS`.
    sort: str = "node"
    reverse: bool = False
    #: The node whose rows are shown; None: all nodes.
    node: str | None = None
    #: Whether each node is one row; None: where the rows are more than the screen has.
    fold: bool | None = None
    #: Rows that are scrolled past.
    offset: int = 0


@dataclass(frozen=True)
class Page:
    """The rows on the screen."""

    rows: tuple[Row, ...]
    #: Whether each row is a node.
    folded: bool
    #: Number of the first row, and of rows in total.
    first: int
    total: int


def keys_of(text: str) -> Iterator[str]:
    r"""The keys of what a terminal has sent; of a sequence that is none of ours nothing.

    >>> [*keys_of("s\x1b[Bq"), *keys_of("\x1b[1;5C")]
    ['s', 'down', 'q']
    """
    while text:
        if not text.startswith("\x1b"):
            yield text[0]
            text = text[1:]
            continue
        known = next((sequence for sequence in _SEQUENCES if text.startswith(sequence)), None)
        if known is None:
            return
        yield _SEQUENCES[known]
        text = text.removeprefix(known)


def press(view: View, key: str, rows: Sequence[Row], height: int) -> bool:
    """Change the view as the key says; False: the key is to quit. `height`: rows that the screen has."""
    if key == "q":
        return False
    step = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -height, "page down": height}.get(key)
    if step is not None:
        view.offset = max(0, min(view.offset + step, page_of(view, rows, height).total - height))
        return True
    if key == "s":
        names = [*SORTS]
        view.sort = names[(names.index(view.sort) + 1) % len(names)]
        view.reverse = False
    elif key == "r":
        view.reverse = not view.reverse
    elif key in ("n", "N"):
        view.node = _next(
            view.node, [None, *dict.fromkeys(row.node for row in rows)], 1 if key == "n" else -1
        )
    elif key == "f":
        view.fold = not page_of(view, rows, height).folded
    else:
        return True
    view.offset = 0
    return True


def _next(node: str | None, nodes: Sequence[str | None], step: int) -> str | None:
    place = nodes.index(node) if node in nodes else 0
    return nodes[(place + step) % len(nodes)]


def page_of(view: View, rows: Sequence[Row], height: float = math.inf) -> Page:
    """The rows that this view shows on a screen of so many."""
    shown = [row for row in rows if view.node is None or row.node == view.node]
    folds = view.fold if view.fold is not None else view.node is None and len(shown) > height
    if folds:
        shown = folded(shown)
    shown = _sorted(shown, view)
    first = int(max(0, min(view.offset, len(shown) - height)))
    last = len(shown) if height == math.inf else first + int(height)
    return Page(tuple(shown[first:last]), folds, first, len(shown))


def _sorted(rows: list[Row], view: View) -> list[Row]:
    figure = SORTS[view.sort]
    if figure is None:
        return rows[::-1] if view.reverse else rows
    known = [(value, row) for row in rows if (value := figure(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=not view.reverse)
    return [row for _, row in known] + [row for row in rows if figure(row) is None]


def folded(rows: Iterable[Row]) -> list[Row]:
    """One row for each node: the mean of the GPUs' use, and sums of all else."""
    by_node: dict[str, list[Row]] = {}
    for row in rows:
        by_node.setdefault(row.node, []).append(row)
    return [_fold(node, group) for node, group in by_node.items()]


#: The fields of `Row` that are summed.
_SUMMED: tuple[str, ...] = (
    "gpu_memory",
    "gpu_memory_total",
    "rmm_used",
    "rmm_total",
    "host_memory",
    "host_limit",
)
_SUMMED += ("running", "waiting", "received", "sent", "received_rate", "sent_rate", "spilled")


def _fold(node: str, rows: Sequence[Row]) -> Row:
    uses = [row.gpu_use for row in rows if row.gpu_use is not None]
    sums: dict[str, Any] = {}
    for name in _SUMMED:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        sums[name] = sum(known) if known else None
    workers = {row.worker for row in rows}
    return Row(
        node=node,
        worker=str(len(workers)),
        status=troubles(rows) or "running",
        gpu_use=sum(uses) / len(uses) if uses else None,
        **sums,
    )


def troubles(rows: Iterable[Row]) -> str:
    """How many workers do not run, by their status; empty: all run.

    >>> troubles([Row(node="n", worker="0"), Row(node="n", worker="1", status="running")])
    '(1 lost)'
    """
    # a worker of several GPUs has a row for each
    statuses = Counter({row.worker: row.status for row in rows if row.status != "running"}.values())
    return f"({', '.join(f'{count} {status}' for status, count in statuses.items())})" if statuses else ""
