"""Snapshots as Rich draws them: a table that fits the width, and around it the job, its warnings and the keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dask_gpu_mpi.base.durations import clock

from .snapshot import Row, Snapshot
from .top_view import Page, View, folded, page_of, share, troubles

__all__ = ["fit", "pair", "plain", "room_for_rows", "screen", "short", "table"]

KEYS = "q quit  s sort  r reverse  n/N node  f fold  j/k scroll"
#: Lines for warnings on the screen.
WARNING_LINES = 3
#: From which part of what there is a figure is coloured.
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


COLUMNS = (
    _Column("NODE", 8, _plain(lambda row: row.node), 0, grows=True),
    _Column("WORKER", 8, _worker, 0, grows=True),
    _Column("GPU", 3, _plain(lambda row: _number(row.gpu_index)), 6),
    _Column("USE%", 4, _plain(lambda row: _number(row.gpu_use)), 0),
    _Column("GPU MEM", 8, _part("gpu_memory", "gpu_memory_total"), 1),
    _Column("RMM", 8, _part("rmm_used", "rmm_total"), 7),
    _Column("HOST MEM", 8, _part("host_memory", "host_limit"), 2),
    _Column("RUN", 3, _plain(lambda row: _number(row.running)), 3),
    _Column("WAIT", 4, _plain(lambda row: _number(row.waiting)), 4),
    _Column("IN/s", 5, _plain(lambda row: short(row.received_rate)), 8),
    _Column("OUT/s", 5, _plain(lambda row: short(row.sent_rate)), 9),
    _Column("SPILL", 5, _plain(lambda row: short(row.spilled)), 5),
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
    """Bytes used of a total, in eight characters where there is not more used than there is.

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
    """A text in so many characters; of a long one the end stays, by which names differ.

    >>> fit("gpu-node-0123", 8), fit("short", 8), fit("a long line", 6, keep_end=False)
    ('..e-0123', 'short', 'a lo..')
    """
    if len(text) <= width:
        return text
    kept = max(0, width - 2)
    return (".." + text[len(text) - kept :] if keep_end else text[:kept] + "..")[:width]


def table(rows: Sequence[Row], width: int | None) -> Table:
    """The rows in so many columns of the screen; None: as wide as they are."""
    columns = [c for c in COLUMNS if c.title != "GPU" or any(row.gpu_index is not None for row in rows)]
    while width is not None and len(columns) > 3 and _width(columns, [c.width for c in columns]) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [column.width for column in columns]
    for place, column in reversed([*enumerate(columns)]):  # a long name of a node is no loss
        if column.grows or width is None:
            longest = max((len(line[place][0]) for line in cells), default=0)
            spare = longest if width is None else width - _width(columns, widths)
            widths[place] += max(0, min(longest - column.width, spare))
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for column, each in zip(columns, widths, strict=True):
        made.add_column(
            column.title,
            width=each,
            no_wrap=True,
            overflow="crop",
            justify="left" if column.grows else "right",
        )
    for line in cells:
        made.add_row(
            *(Text(fit(text, each), style=style) for (text, style), each in zip(line, widths, strict=True))
        )
    return made


def _width(columns: Sequence[_Column], widths: Sequence[int]) -> int:
    return sum(widths) + len(columns) - 1


def room_for_rows(snapshot: Snapshot, height: int) -> int:
    """How many rows a screen of this height has."""
    return max(1, height - 5 - len(_warnings(snapshot)))


def screen(
    snapshot: Snapshot, view: View, width: int, height: int, silence: float | None = None
) -> RenderableType:
    """The whole screen; `silence`: for how many seconds the scheduler has not answered, if it does not."""
    page = page_of(view, snapshot.rows, room_for_rows(snapshot, height))
    lines = [Text(fit(line, width, keep_end=False)) for line in _head(snapshot, silence)]
    warnings = [Text(fit(line, width, keep_end=False), style="yellow") for line in _warnings(snapshot)]
    status = Text(fit(_status(view, page), width, keep_end=False), style="dim")
    keys = Text(fit(KEYS, width, keep_end=False), style="dim")
    return Group(*lines, table(page.rows, width), *warnings, status, keys)


def plain(snapshot: Snapshot, width: int | None) -> RenderableType:
    """All rows and all warnings, in so many columns; None: as many as they need."""
    lines = [*_head(snapshot), *_all_warnings(snapshot)]
    shown = [Text(line if width is None else fit(line, width, keep_end=False)) for line in lines]
    return Group(*shown[:2], table(snapshot.rows, width), *shown[2:])


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
    (total,) = folded([_everywhere(row) for row in rows])
    sums = (
        f"USE {_number(total.gpu_use)}%  GPU MEM {pair(total.gpu_memory, total.gpu_memory_total)}  "
        f"HOST MEM {pair(total.host_memory, total.host_limit)}  RUN {_number(total.running)}  "
        f"WAIT {_number(total.waiting)}  SPILL {short(total.spilled)}"
    )
    return [f"{title}  {snapshot.scheduler}", sums]


def _everywhere(row: Row) -> Row:
    return replace(row, node="")


def _warnings(snapshot: Snapshot) -> list[str]:
    """The last ones."""
    return _all_warnings(snapshot)[-WARNING_LINES:]


def _all_warnings(snapshot: Snapshot) -> list[str]:
    """Of the start, then of the run."""
    events = [
        f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}" for event in snapshot.events
    ]
    return [*(f"at start: {note}" for note in snapshot.notes), *events]


def _status(view: View, page: Page) -> str:
    parts = [f"sort: {view.sort}{' reversed' if view.reverse else ''}", f"node: {view.node or 'all'}"]
    parts.append(f"rows {page.first + 1}-{page.first + len(page.rows)} of {page.total}")
    if page.folded:
        parts.append("one row per node: sums, mean USE")
    return "  ".join(parts)
