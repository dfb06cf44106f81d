"""Tables for people, drawn by Rich: in colour on a terminal; elsewhere plain, and as wide as they are.

Rich is imported when something is drawn: no rank or agent needs it to start.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from dask_gpu_mpi.base.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

#: Up to so many nodes have an entry each; of more, those that look alike share one.
MANY_NODES = 16
#: Columns of what goes into a file or a pipe: no line is longer.
ANY_WIDTH = 1_000_000


def styled(text: str, style: str = "") -> Text:
    """A text in which nothing is markup or an escape code, whatever it contains."""
    from rich.text import Text

    return Text().append(printable(text), style)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    widths: Sequence[int] = (),
    gap: int = 2,
    indent: int = 2,
    style: str = "dim",
) -> RenderableType:
    """A table without lines.

    The columns in `right` have numbers. Columns have these widths; without any, each is as wide as its cells, and is folded on a
    narrow terminal.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(header), header_style=style
    )
    for place, name in enumerate(header):
        made.add_column(
            name,
            justify="right" if name in right else "left",
            width=widths[place] if widths else None,
            no_wrap=bool(widths),
            overflow="crop" if widths else "fold",
        )
    cells = [[styled(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if widths and cells:  # each column is one cell of many lines, which Rich draws ten times as fast
        cells = [[Text("\n").join(column) for column in zip(*cells, strict=True)]]
    for row in cells:
        made.add_row(*row)
    return Padding(made, (0, 0, 0, indent), expand=False)


def widths_of(rows: Iterable[Sequence[str]]) -> list[int]:
    """The widths of columns that tables below each other share."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def text_of(parts: Iterable[RenderableType]) -> str:
    """Tables and lines as plain text, without a trailing newline."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=ANY_WIDTH, color_system=None, highlight=False, _environ={})
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "\n".join(text.rstrip() for text in captured.get().splitlines())


def is_terminal() -> bool:
    """Whether standard output is a terminal that shows colours, and the user wants them."""
    # Open MPI gives its ranks a terminal as standard output, wherever that goes, but not as standard error.
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def show(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines to standard output."""
    from rich.console import Console

    if is_terminal():
        Console(highlight=False).print(*parts, sep="\n")
    else:
        print(text_of(parts))
