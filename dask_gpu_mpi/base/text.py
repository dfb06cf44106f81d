"""Text for people, of which all modules make their messages and tables.

In this order: texts of others that are safe to print, errors and the end of processes, times and counts, many numbers or names in
short, bytes, and tables.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dask_gpu_mpi.errors import OptionError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


Item = TypeVar("Item")


def printable(text: str) -> str:
    r"""Replace control characters, halves of surrogate pairs, and marks that change the direction of writing.

    The result moves no cursor, can be encoded, and is valid in XML once it is escaped.

    >>> printable("n1\x1b[31m"), printable("Größe 5")
    ('n1�[31m', 'Größe 5')
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def one_line(text: object, most: int = 300) -> str:
    r"""A text on one line of at most so many characters, to make it part of a message.

    >>> one_line("Error\n  in a task"), one_line("Error in a task", 8)
    ('Error in a task', 'Error...')
    """
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def exit_text(code: int) -> str:
    """How a process has ended, by the exit code of `subprocess`.

    >>> exit_text(3), exit_text(-9)
    ('exit code 3', 'killed by signal SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else f"killed by signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def text_of(error: BaseException) -> str:
    """The text of an exception; empty if its class, which may be the user's, fails to give one.

    >>> text_of(ValueError("no such file"))
    'no such file'
    """
    try:
        return str(error)
    except Exception:
        return ""


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(59.9), clock(3725), clock(90061)
    ('0:00:59', '1:02:05', '25:01:01')
    """
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


# Many numbers or names in short: ``0-3,7`` and ``h[1-64]``.

#: Digits of the longest number at the end of a name that is folded.
MOST_DIGITS = 18
#: Places that a list has before it counts the others.
MOST_PLACES = 8


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """The items whose keys are equal, such as nodes that look alike, in the order of the first of them.

    >>> grouped(["h1", "gpu1", "h2"], lambda name: name[0])
    [['h1', 'h2'], ['gpu1']]
    """
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def fold_numbers(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges.

    >>> fold_numbers([7, 0, 1, 2, 2]), fold_numbers([])
    ('0-2,7', '')
    """
    return ",".join(_fold(sorted(set(numbers)), width=0))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as ranges.

    >>> ranks_text([3]), ranks_text(range(4, 8))
    ('rank 3', 'ranks 4-7')
    """
    found = sorted(set(ranks))
    return f"rank{'' if len(found) == 1 else 's'} {fold_numbers(found)}"


def fold_names(names: Iterable[str]) -> str:
    """Host names as Slurm writes them; zero-padding is kept.

    >>> fold_names(["h1", "h2", "h3"]), fold_names(["login", "n07", "n08", "n10"])
    ('h[1-3]', 'login,n[07-08],n10')
    """
    found: list[str] = []
    groups: dict[tuple[str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if not 0 < len(digits) <= MOST_DIGITS:
            found.append(name)
            continue
        # A padded number only folds with others of its width, so that the names can be expanded again.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((stem, width), []).append(int(digits))
    for (stem, width), numbers in groups.items():
        parts = _fold(sorted(numbers), width)
        found.append(f"{stem}{parts[0]}" if len(numbers) == 1 else f"{stem}[{','.join(parts)}]")
    return ",".join(found)


def _fold(numbers: Iterable[int], width: int) -> list[str]:
    """Sorted numbers as ranges, such as ``0-2``, each number with at least so many digits."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [
        f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        for first, last in ranges
    ]


def listed(places: Sequence[str]) -> str:
    """The first places, and the number of the others: a message about a large job stays short.

    >>> listed(["h1", "h2"]), listed([f"h{number}" for number in range(10)])
    ('h1, h2', 'h0, h1, h2, h3, h4, h5, h6, h7 and 2 more')
    """
    text = ", ".join(places[:MOST_PLACES])
    more = len(places) - MOST_PLACES
    return f"{text} and {more} more" if more > 0 else text


# Bytes, in Dask's units.


def parse_bytes(text: str) -> int:
    """Read a number of bytes as `dask.utils.parse_bytes` does; raises ValueError, also for one that Dask would guess.

    >>> parse_bytes("4GB"), parse_bytes("1.5 GiB"), parse_bytes("1e9"), parse_bytes("512")
    (4000000000, 1610612736, 1000000000, 512)
    """
    from dask import utils

    try:
        size: int = utils.parse_bytes(text) if text.strip() else -1
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(f"{text[:40]!r} is not a number of bytes (expected 4GB, 1.5GiB or the like)")
    return size


def format_bytes(number: int) -> str:
    """A number of bytes in binary units.

    >>> format_bytes(64 * 1024**3), format_bytes(512)
    ('64.00 GiB', '512 B')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"


def parse_memory_limit(limit: int | float | str | None) -> int | float | None:
    """Read a worker's memory limit as Dask does: None for ``"auto"``, a float for a fraction, bytes (0: no limit) as int.

    Raises an OptionError. Source: ``distributed.worker_memory.parse_memory_limit``.

    >>> parse_memory_limit("4GiB"), parse_memory_limit(0.5), parse_memory_limit(1), parse_memory_limit(None)
    (4294967296, 0.5, 1.0, 0)
    >>> parse_memory_limit("auto") is None
    True
    """
    if limit is None:
        return 0
    if limit == "auto":
        return None
    try:
        number = float(limit)
    except (ValueError, TypeError, OverflowError):
        with contextlib.suppress(ValueError):
            return parse_bytes(str(limit))
        number = -1.0
    if not 0 <= number < math.inf:
        raise OptionError(
            f"memory_limit: invalid value {repr(limit)[:60]}",
            expected="bytes such as '4GB', a fraction of the host's memory, 'auto' or 0",
        )
    return number if 0 < number <= 1 else int(number)


# Tables for people, drawn by Rich: in colour on a terminal; elsewhere plain, and as wide as they are. Rich is imported when
# something is drawn: no rank or agent needs it to start.

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

    The columns in `right` have numbers. Columns without `widths` are as wide as their cells, and folded on a narrow terminal.
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


def plain_text(parts: Iterable[RenderableType]) -> str:
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
        print(plain_text(parts))
