"""The screen of `top`: a table of a snapshot that fits the width, around it the job, its warnings and keys. Pure functions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dask_gpu_mpi.base.text import clock, grouped, styled, table
from dask_gpu_mpi.view.snapshot import Row, Snapshot

KEYS = "q quit  s sort  r reverse  n/N node  f fold  j/k scroll"
#: Lines for warnings on the screen.
WARNING_LINES = 3


def screen(
    snapshot: Snapshot, view: View, width: int, height: int, silence: float | None = None
) -> RenderableType:
    """The whole screen; `silence`: the seconds since a request without an answer, if there is one."""
    page = page_of(view, snapshot.rows, rows_of_screen(snapshot, height))
    head = [_line(text) for text in _head(snapshot, silence)]
    warnings = [_line(text, "yellow") for text in _warnings(snapshot)[-WARNING_LINES:]]
    status, keys = _line(_status(view, page), "dim"), _line(KEYS, "dim")
    return Group(*head, table_of(page.rows, width), *warnings, status, keys)


def plain(snapshot: Snapshot, width: int | None) -> RenderableType:
    """All rows and all warnings, in so many columns; None: as many as they need."""
    head, warnings = map(_line, _head(snapshot)), map(_line, _warnings(snapshot))
    return Group(*head, table_of(snapshot.rows, width), *warnings)


def rows_of_screen(snapshot: Snapshot, height: int) -> int:
    """The number of rows on a screen of this height."""
    return max(1, height - 5 - len(_warnings(snapshot)[-WARNING_LINES:]))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _head(snapshot: Snapshot, silence: float | None = None) -> list[str]:
    """The job, and its sums."""
    rows = snapshot.rows
    gpus = sum(row.device is not None or row.gpu_use is not None for row in rows)
    workers, nodes = len({row.worker for row in rows}), len({row.node for row in rows})
    left = "" if snapshot.time_left is None else f"{clock(snapshot.time_left)} left, "
    others = troubles(rows)
    silent = "" if silence is None else f"no answer for {silence:.0f} s, "
    title = f"{silent}{left}nodes {nodes}, GPUs {gpus}, workers {workers}{f' {others}' if others else ''}"
    if not rows:
        return [f"{title}  {snapshot.scheduler}", "no worker yet"]
    (total,) = folded([replace(row, node="") for row in rows])
    sums = (
        f"USE {_number(total.gpu_use)}%  GPU MEM {pair(total.gpu_memory, total.gpu_memory_total)}  "
        f"HOST MEM {pair(total.host_memory, total.host_limit)}  RUN {_number(total.running)}  "
        f"WAIT {_number(total.waiting)}  SPILL {short(total.spilled)}"
    )
    if total.gpu_power is not None:
        sums += f"  POWER {total.gpu_power:.0f} W"
    return [f"{title}  {snapshot.scheduler}", sums]


def _warnings(snapshot: Snapshot) -> list[str]:
    """The warnings of the start, then those of the run."""
    run = [f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}" for at, text in snapshot.events]
    return [*(f"at start: {note}" for note in snapshot.notes), *run]


def _status(view: View, page: Page) -> str:
    parts = [f"sort: {view.sort}{' reversed' if view.reverse else ''}", f"node: {view.node or 'all'}"]
    parts.append(f"rows {page.first + 1}-{page.first + len(page.rows)} of {page.total}")
    if page.folded:
        parts.append("one row per node: sums, mean USE, highest TEMP")
    return "  ".join(parts)


# The rows that keys choose.

#: The sequences that terminals send for keys without a character.
_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_SEQUENCES |= {"\x1b[5~": "page up", "\x1b[6~": "page down"}


@dataclass
class View:
    """The state that keys change."""

    #: A key of `SORTS`.
    sort: str = "NODE"
    reverse: bool = False
    #: The node whose rows are shown; None: all nodes.
    node: str | None = None
    #: Whether each node is one row; None: if there are more rows than the screen has.
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
    r"""The keys that a terminal has sent; other sequences are left out.

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
    """Change the view by a key; False: the key is `q`. `height`: the number of rows on the screen."""
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
        nodes = [None, *dict.fromkeys(row.node for row in rows)]
        place = nodes.index(view.node) if view.node in nodes else 0
        view.node = nodes[(place + (1 if key == "n" else -1)) % len(nodes)]
    elif key == "f":
        view.fold = not page_of(view, rows, height).folded
    else:
        return True
    view.offset = 0
    return True


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
    field = SORTS[view.sort]
    if field == "node":
        return rows[::-1] if view.reverse else rows
    known = [row for row in rows if getattr(row, field) is not None]
    known.sort(key=lambda row: float(getattr(row, field)), reverse=not view.reverse)
    return known + [row for row in rows if getattr(row, field) is None]


def folded(rows: Iterable[Row]) -> list[Row]:
    """One row for each node: the mean of the GPUs' use, their highest temperature, and sums of the rest."""
    return list(map(_fold, grouped(rows, lambda row: row.node)))


#: The fields of `Row` that are summed.
_SUMMED = (
    "gpu_memory", "gpu_memory_total", "rmm_used", "rmm_total", "host_memory", "host_limit", "running", "waiting", "received",
    "sent", "received_rate", "sent_rate", "spilled", "gpu_power", "gpu_energy", "gpu_pcie", "gpu_nvlink",
)  # fmt: skip


def _fold(rows: Sequence[Row]) -> Row:
    uses = [row.gpu_use for row in rows if row.gpu_use is not None]
    sums: dict[str, Any] = {}
    for name in _SUMMED:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        sums[name] = sum(known) if known else None
    workers = {row.worker for row in rows}
    temperatures = [row.gpu_temperature for row in rows if row.gpu_temperature is not None]
    slowed = [row.gpu_slowed.split("+") for row in rows if row.gpu_slowed is not None]
    return Row(
        node=rows[0].node,
        worker=str(len(workers)),
        status=troubles(rows) or "running",
        gpu_use=sum(uses) / len(uses) if uses else None,
        gpu_temperature=max(temperatures, default=None),
        gpu_slowed="+".join(sorted({why for each in slowed for why in each if why})) if slowed else None,
        **sums,
    )


def troubles(rows: Iterable[Row]) -> str:
    """The number of workers that do not run, by their status; empty: all run.

    >>> troubles([Row(node="n", worker="0"), Row(node="n", worker="1", status="running")])
    '(1 lost)'
    """
    # a worker of several GPUs has a row for each
    statuses = Counter({row.worker: row.status for row in rows if row.status != "running"}.values())
    return f"({', '.join(f'{count} {status}' for status, count in statuses.items())})" if statuses else ""


# The table: figures in few characters, and columns that give way on a narrow screen.


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def short(number: float | None) -> str:
    """Bytes in five characters at most, in binary units.

    >>> short(None), short(0), short(1536), short(200 * 2**30), short(1010 * 2**20)
    ('-', '0', '1.5K', '200G', '1.0G')
    """
    if number is None:
        return "-"
    unit, value = _unit(number)
    return f"{_digits(value)}{unit}" if unit else f"{number:.0f}"


def pair(used: int | None, total: int | None) -> str:
    """Bytes used of a total, in eight characters if that is not more than the total.

    >>> pair(8 * 2**30, 80 * 2**30), pair(130 * 2**30, 512 * 2**30), pair(2**30, None), pair(None, 5)
    ('8.0/80G', '130/512G', '1.0G', '-')
    """
    if used is None or not total:
        return short(used)
    unit, value = _unit(total)
    return f"{_digits(used * value / total)}/{_digits(value)}{unit}"


def _unit(number: float) -> tuple[str, float]:
    """A unit in which the number has three digits at most, and the number in it."""
    value, unit = float(number), ""
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1024
    return unit, value


def _digits(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:.0f}"


def fit(text: str, width: int) -> str:
    """A text in so many characters. The end of a long one stays, since names differ there.

    >>> fit("gpu-node-0123", 8), fit("short", 8)
    ('..e-0123', 'short')
    """
    if len(text) <= width:
        return text
    return (".." + text[len(text) - max(0, width - 2) :])[:width]


#: The parts of the total from which on a figure is coloured.
HIGH, FULL = 0.8, 0.95


@dataclass(frozen=True)
class _Column:
    """A column of a field of `Row`; `width`: its least."""

    title: str
    width: int
    field: str
    text: Callable[[Any], str]
    #: On a narrow screen the highest number goes first; 0: it stays.
    rank: int = 0
    #: The field of which this one is a part.
    total: str = ""
    #: Whether it may be wider, up to its longest text.
    grows: bool = False
    #: Whether it is left out if no row has this field.
    optional: bool = False

    def cell(self, row: Row) -> tuple[str, str]:
        """Text and style."""
        value = getattr(row, self.field)
        if self.total:
            total = getattr(row, self.total)
            part = value / total if value is not None and total else 0.0
            return pair(value, total), "red" if part >= FULL else "yellow" if part >= HIGH else ""
        if self.field == "worker" and row.status != "running":
            return f"{value} {row.status}", "red" if "lost" in row.status else "yellow"
        return self.text(value), "yellow" if self.field == "gpu_slowed" and value else ""


COLUMNS = (
    _Column("NODE", 8, "node", str, grows=True),
    _Column("WORKER", 8, "worker", str, grows=True),
    _Column("GPU", 3, "gpu_index", _number, 6, optional=True),
    _Column("USE%", 4, "gpu_use", _number),
    _Column("GPU MEM", 8, "gpu_memory", short, 1, total="gpu_memory_total"),
    _Column("RMM", 8, "rmm_used", short, 7, total="rmm_total"),
    _Column("HOST MEM", 8, "host_memory", short, 2, total="host_limit"),
    _Column("RUN", 3, "running", _number, 3),
    _Column("WAIT", 4, "waiting", _number, 4),
    _Column("IN/s", 5, "received_rate", short, 8),
    _Column("OUT/s", 5, "sent_rate", short, 9),
    _Column("SPILL", 5, "spilled", short, 5),
    _Column("WATT", 4, "gpu_power", _number, 10, optional=True),
    _Column("TEMP", 4, "gpu_temperature", _number, 11, optional=True),
    _Column("SLOWED", 6, "gpu_slowed", lambda reasons: reasons or "-", 12, grows=True, optional=True),
    _Column("PCI/s", 5, "gpu_pcie", short, 13, optional=True),
    _Column("NVL/s", 5, "gpu_nvlink", short, 14, optional=True),
)
#: The columns that rows are sorted by, in the order of the key `s`; the first is the plan's order. The largest comes first.
SORTS = {
    column.title: column.field
    for column in COLUMNS
    if column.field not in ("worker", "gpu_index", "gpu_slowed")
}


def table_of(rows: Sequence[Row], width: int | None) -> RenderableType:
    """The rows in so many columns of the screen; None: as wide as they are."""
    columns = [
        column
        for column in COLUMNS
        if not column.optional or any(getattr(row, column.field) is not None for row in rows)
    ]
    while width is not None and len(columns) > 3 and _width(columns, [c.width for c in columns]) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [column.width for column in columns]
    for place, column in reversed([*enumerate(columns)]):  # the node's name, the first, gets the rest
        if column.grows or width is None:
            longest = max((len(line[place][0]) for line in cells), default=0)
            spare = longest if width is None else width - _width(columns, widths)
            widths[place] += max(0, min(longest - column.width, spare))
    return table(
        [column.title for column in columns],
        [
            [styled(fit(text, each), style) for (text, style), each in zip(line, widths, strict=True)]
            for line in cells
        ],
        right=[column.title for column in columns if not column.grows],
        widths=widths,
        gap=1,
        indent=0,
        style="bold",
    )


def _width(columns: Sequence[_Column], widths: Sequence[int]) -> int:
    return sum(widths) + len(columns) - 1
