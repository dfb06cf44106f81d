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

from dask_gpu_mpi.base.tables import styled, table
from dask_gpu_mpi.base.text import clock
from dask_gpu_mpi.view.snapshot import Row, Snapshot

KEYS = "q quit  s sort  r reverse  n/N node  f fold  j/k scroll"
#: Lines for warnings on the screen.
WARNING_LINES = 3
#: The parts of the total from which on a figure is coloured.
HIGH, FULL = 0.8, 0.95


@dataclass(frozen=True)
class _Column:
    """A column; `width`: its least."""

    title: str
    width: int
    #: Text and style of a row.
    cell: Callable[[Row], tuple[str, str]]
    #: On a narrow screen the highest number goes first; 0: it stays.
    rank: int
    #: Whether it may be wider, up to its longest text.
    grows: bool = False
    #: Without this field of any row the column is left out.
    needs: str = ""


def _plain(text: Callable[[Row], str]) -> Callable[[Row], tuple[str, str]]:
    return lambda row: (text(row), "")


def _part(used: str, total: str) -> Callable[[Row], tuple[str, str]]:
    def cell(row: Row) -> tuple[str, str]:
        numbers = getattr(row, used), getattr(row, total)
        return pair(*numbers), _style(share(*numbers))

    return cell


def _style(part: float | None) -> str:
    if part is None or part < HIGH:
        return ""
    return "red" if part >= FULL else "yellow"


def _worker(row: Row) -> tuple[str, str]:
    if row.status == "running":
        return row.worker, ""
    return f"{row.worker} {row.status}", "red" if "lost" in row.status else "yellow"


def _slowed(row: Row) -> tuple[str, str]:
    return row.gpu_slowed or "-", "yellow" if row.gpu_slowed else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


COLUMNS = (
    _Column("NODE", 8, _plain(lambda row: row.node), 0, grows=True),
    _Column("WORKER", 8, _worker, 0, grows=True),
    _Column("GPU", 3, _plain(lambda row: _number(row.gpu_index)), 6, needs="gpu_index"),
    _Column("USE%", 4, _plain(lambda row: _number(row.gpu_use)), 0),
    _Column("GPU MEM", 8, _part("gpu_memory", "gpu_memory_total"), 1),
    _Column("RMM", 8, _part("rmm_used", "rmm_total"), 7),
    _Column("HOST MEM", 8, _part("host_memory", "host_limit"), 2),
    _Column("RUN", 3, _plain(lambda row: _number(row.running)), 3),
    _Column("WAIT", 4, _plain(lambda row: _number(row.waiting)), 4),
    _Column("IN/s", 5, _plain(lambda row: short(row.received_rate)), 8),
    _Column("OUT/s", 5, _plain(lambda row: short(row.sent_rate)), 9),
    _Column("SPILL", 5, _plain(lambda row: short(row.spilled)), 5),
    _Column("WATT", 4, _plain(lambda row: _number(row.gpu_power)), 10, needs="gpu_power"),
    _Column("TEMP", 4, _plain(lambda row: _number(row.gpu_temperature)), 11, needs="gpu_temperature"),
    _Column("SLOWED", 6, _slowed, 12, grows=True, needs="gpu_slowed"),
    _Column("PCI/s", 5, _plain(lambda row: short(row.gpu_pcie)), 13, needs="gpu_pcie"),
    _Column("NVL/s", 5, _plain(lambda row: short(row.gpu_nvlink)), 14, needs="gpu_nvlink"),
)


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

    >>> pair(8 * 2**30, 80 * 2**30), pair(130 * 2**30, 512 * 2**30), pair(2**30, None), pair(None, None)
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


def fit(text: str, width: int, *, keep_end: bool = True) -> str:
    """A text in so many characters. The end of a long one stays, since names differ there.

    >>> fit("gpu-node-0123", 8), fit("short", 8), fit("a long line", 6, keep_end=False)
    ('..e-0123', 'short', 'a lo..')
    """
    if len(text) <= width:
        return text
    kept = max(0, width - 2)
    return (".." + text[len(text) - kept :] if keep_end else text[:kept] + "..")[:width]


def table_of(rows: Sequence[Row], width: int | None) -> RenderableType:
    """The rows in so many columns of the screen; None: as wide as they are."""
    columns = [
        column
        for column in COLUMNS
        if not column.needs or any(getattr(row, column.needs) is not None for row in rows)
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


def rows_of_screen(snapshot: Snapshot, height: int) -> int:
    """The number of rows on a screen of this height."""
    return max(1, height - 5 - len(_warnings(snapshot)))


def screen(
    snapshot: Snapshot, view: View, width: int, height: int, silence: float | None = None
) -> RenderableType:
    """The whole screen; `silence`: the seconds since a request without an answer, if there is one."""
    page = page_of(view, snapshot.rows, rows_of_screen(snapshot, height))
    lines = [Text(fit(line, width, keep_end=False)) for line in _head(snapshot, silence)]
    warnings = [Text(fit(line, width, keep_end=False), style="yellow") for line in _warnings(snapshot)]
    status = Text(fit(_status(view, page), width, keep_end=False), style="dim")
    keys = Text(fit(KEYS, width, keep_end=False), style="dim")
    return Group(*lines, table_of(page.rows, width), *warnings, status, keys)


def plain(snapshot: Snapshot, width: int | None) -> RenderableType:
    """All rows and all warnings, in so many columns; None: as many as they need."""
    lines = [*_head(snapshot), *_all_warnings(snapshot)]
    shown = [Text(line if width is None else fit(line, width, keep_end=False)) for line in lines]
    return Group(*shown[:2], table_of(snapshot.rows, width), *shown[2:])


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
    """The last warnings."""
    return _all_warnings(snapshot)[-WARNING_LINES:]


def _all_warnings(snapshot: Snapshot) -> list[str]:
    """The warnings of the start, then those of the run."""
    events = [
        f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}" for event in snapshot.events
    ]
    return [*(f"at start: {note}" for note in snapshot.notes), *events]


def _status(view: View, page: Page) -> str:
    parts = [f"sort: {view.sort}{' reversed' if view.reverse else ''}", f"node: {view.node or 'all'}"]
    parts.append(f"rows {page.first + 1}-{page.first + len(page.rows)} of {page.total}")
    if page.folded:
        parts.append("one row per node: sums, mean USE, highest TEMP")
    return "  ".join(parts)


def share(used: int | None, total: int | None) -> float | None:
    """A part of 1.

    >>> share(1, 4), share(1, None)
    (0.25, None)
    """
    return None if used is None or not total else used / total


#: The figures that rows are sorted by, in the order of the key `s`; the first is the plan's order. The largest comes first.
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
    "power": lambda row: row.gpu_power,
    "temperature": lambda row: row.gpu_temperature,
}
#: The sequences that terminals send for keys without a character.
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
    """One row for each node: the mean of the GPUs' use, their highest temperature, and sums of the rest."""
    by_node: dict[str, list[Row]] = {}
    for row in rows:
        by_node.setdefault(row.node, []).append(row)
    return [_fold(node, group) for node, group in by_node.items()]


#: The fields of `Row` that are summed.
_SUMMED = (
    "gpu_memory", "gpu_memory_total", "rmm_used", "rmm_total", "host_memory", "host_limit", "running", "waiting", "received",
    "sent", "received_rate", "sent_rate", "spilled", "gpu_power", "gpu_energy", "gpu_pcie", "gpu_nvlink",
)  # fmt: skip


def _fold(node: str, rows: Sequence[Row]) -> Row:
    uses = [row.gpu_use for row in rows if row.gpu_use is not None]
    sums: dict[str, Any] = {}
    for name in _SUMMED:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        sums[name] = sum(known) if known else None
    workers = {row.worker for row in rows}
    temperatures = [row.gpu_temperature for row in rows if row.gpu_temperature is not None]
    slowed = [row.gpu_slowed.split("+") for row in rows if row.gpu_slowed is not None]
    return Row(
        node=node,
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
