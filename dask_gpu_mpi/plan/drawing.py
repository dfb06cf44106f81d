"""Parts of an SVG picture, and how they are put beside and below each other. Text has no measure here: its width is estimated."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dask_gpu_mpi.base.printable import printable

__all__ = ["GAP", "LINE", "Part", "at", "extent", "flow", "paragraph", "rectangle", "stack", "text", "titled"]

#: Pixels between parts, and from one line of text to the next.
GAP, LINE = 8, 16
#: Widths of a letter in sizes of its font, on average; those of wide fonts.
LETTER, BOLD_LETTER = 0.61, 0.64
#: Classes of text whose size is another than 12, and those that are bold, as the style sheet has them.
SIZES = {"top": 15, "small": 11, "on": 11}
BOLD = ("top", "head", "bad", "on")
#: Lines of each text of a paragraph.
MOST_LINES = 4
INDENT = "   "


@dataclass(frozen=True)
class Part:
    """A part of the picture, its upper left corner at 0, 0."""

    markup: str
    width: int
    height: int


def flow(parts: Iterable[Part], limit: int, gap: int) -> Part:
    """Parts in rows, from left to right, none wider than the limit where that can be."""
    placed, x, y, row, width = [], 0, 0, 0, 0
    for part in parts:
        if x and x + part.width > limit:
            x, y, row = 0, y + row + gap, 0
        placed.append(at(x, y, part))
        width, row = max(width, x + part.width), max(row, part.height)
        x += part.width + gap
    return Part("".join(placed), width, y + row)


def stack(parts: Sequence[Part]) -> Part:
    """Parts below each other."""
    return flow(parts, 0, GAP)


def at(x: int, y: int, part: Part) -> str:
    """The markup of a part with its corner at that place."""
    if not part.markup:
        return ""
    return f'<g transform="translate({x} {y})">{part.markup}</g>\n' if x or y else part.markup


def rectangle(kind: str, width: int, height: int, *, radius: int = 6) -> str:
    """A box with its corner at 0, 0."""
    return f'<rect class="{kind}" width="{width}" height="{height}" rx="{radius}"/>'


def extent(letters: int, kind: str) -> float:
    """How wide so many letters are."""
    return letters * SIZES.get(kind, 12) * (BOLD_LETTER if kind in BOLD else LETTER)


def text(x: int, y: int, words: str, kind: str = "", *, room: float = 0, anchor: str = "") -> str:
    """A line of text; with a room, shortened to it."""
    words = printable(words)
    letters = int(room / extent(1, kind))
    if room and len(words) > letters:
        words = words[: max(letters - 1, 0)] + "…"
    classes = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{classes} x="{x}" y="{y}"{anchors}>{escape(words)}</text>' if words else ""


def titled(title: str, part: Part) -> Part:
    """A part, with a text for who points at it."""
    return Part(f"<g><title>{escape(printable(title))}</title>{part.markup}</g>", part.width, part.height)


def paragraph(texts: Iterable[str], width: int, kind: str) -> Part:
    """Texts in lines of that width; of long ones the beginning."""
    lines = [
        line
        for words in texts
        for line in textwrap.wrap(
            printable(words),
            int(width / extent(1, kind)),
            max_lines=MOST_LINES,
            placeholder=" …",
            subsequent_indent=INDENT,
        )
    ]
    markup = "".join(
        text(12 if line.startswith(INDENT) else 0, LINE * number, line.strip(), kind)
        for number, line in enumerate(lines, start=1)
    )
    return Part(markup, width, LINE * len(lines) + 4)
