"""Makes benchmarks/results/README.md, the tables of docs/performance.md and its plots from benchmarks/results/*.json.

    python docs/make_performance.py             writes them; plots need matplotlib (pip install matplotlib)
    python docs/make_performance.py --check     says which are not current; needs no matplotlib

So no figure of these pages can differ from the data. A plot that is current is not drawn again; ``--plots`` draws all.
"""

from __future__ import annotations

import sys
from pathlib import Path

from measured import plots, sections, summary
from measured.results import ROOT

MEASUREMENTS = ROOT / "benchmarks" / "results" / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
#: What stands between ``<!-- NAME: made by ... -->`` and ``<!-- end of NAME -->`` in docs/performance.md.
PARTS = {
    "table": summary.main_table,
    "slower": summary.slower_table,
    "gpus": summary.gpus_table,
    "plots": plots.text,
}


def filled(page: str) -> str:
    """The page with its made parts; ValueError where the marks of one are missing."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: made by docs/make_performance.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(
                f"{PERFORMANCE}: no marks of the part {name!r} (expected {begin.strip()} … {end})"
            )
        page = before + begin + make() + end + after
    return page


def stale() -> list[Path]:
    """The files that are not current."""
    page = PERFORMANCE.read_text(encoding="utf-8")
    found = [PERFORMANCE] if filled(page) != page else []
    if not MEASUREMENTS.is_file() or MEASUREMENTS.read_text(encoding="utf-8") != sections.page():
        found.append(MEASUREMENTS)
    return [*found, *(plot.file for plot in plots.PLOTS if not plot.is_current())]


def main() -> int:
    """Write the pages and plots, or compare them."""
    if "--check" in sys.argv[1:]:
        for path in (wrong := stale()):
            print(
                f"{path.relative_to(ROOT)} is not current. Fix: python docs/make_performance.py",
                file=sys.stderr,
            )
        return int(bool(wrong))
    PERFORMANCE.write_text(filled(PERFORMANCE.read_text(encoding="utf-8")), encoding="utf-8")
    MEASUREMENTS.write_text(sections.page(), encoding="utf-8")
    for plot in plots.PLOTS:
        if "--plots" in sys.argv[1:] or not plot.is_current():
            try:
                plots.write(plot)
            except ImportError:
                print(
                    f"{plot.file.relative_to(ROOT)}: no matplotlib. Fix: pip install matplotlib",
                    file=sys.stderr,
                )
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
