"""Makes tables and plots of docs/performance.md and benchmarks/results/README.md from the benchmarks' results.

    python docs/make_performance.py             writes them; plots need matplotlib (pip install matplotlib)
    python docs/make_performance.py --check     lists those that are not current; needs no matplotlib

So no table or plot can differ from the data. Current plots are not drawn again: ``--plots`` draws all.
This program writes between marks only; the rest of a page is by hand. A mark has a function of
measured/tables.py and, if the function has them, a file of results and the caption::

    <!-- made by docs/make_performance.py: idle of overhead, Idle, CPU workers -->
    <!-- end -->
"""

from __future__ import annotations

import sys
from pathlib import Path

from measured import plots, tables
from measured.results import RESULTS, ROOT, caption, load, table

PAGES = (ROOT / "docs" / "performance.md", RESULTS / "README.md")
BEGIN, CLOSE, END = "<!-- made by docs/make_performance.py: ", " -->\n", "<!-- end -->"


def made(mark: str) -> str:
    """The part with this mark: a plot, a summary of several files, or the table of one file."""
    kind, _, rest = mark.partition(" of ")
    name, _, title = rest.partition(", ")
    if kind == "plot":
        return plots.text(name)
    make = getattr(tables, kind)
    rows = make(load(name)) if name else make()
    text = rows if isinstance(rows, str) else table(rows)
    return caption(name, title) + text if title else text


def filled(page: str) -> str:
    """The page with its parts made again; ValueError if one has no end."""
    text, *parts = page.split(BEGIN)
    for part in parts:
        mark, _, rest = part.partition(CLOSE)
        _, ended, after = rest.partition(END)
        if not ended:
            raise ValueError(f"the part {mark!r} has no end (expected {END})")
        text += BEGIN + mark + CLOSE + made(mark) + END + after
    return text


def stale() -> list[Path]:
    """The files that are not current."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    pages = [page for page, text in texts.items() if filled(text) != text]
    return pages + [plots.picture(name) for name in plots.PLOTS if not plots.is_current(name)]


def main() -> int:
    """Write the pages and plots, or compare them."""
    if "--check" in sys.argv[1:]:
        wrong = stale()
        for path in wrong:
            text = f"{path.relative_to(ROOT)} is not current. Fix: python docs/make_performance.py"
            print(text, file=sys.stderr)
        return int(bool(wrong))
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in plots.PLOTS:
        if "--plots" in sys.argv[1:] or not plots.is_current(name):
            try:
                plots.write(name)
            except ImportError:
                file = plots.picture(name).relative_to(ROOT)
                print(f"{file}: no matplotlib. Fix: pip install matplotlib", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
