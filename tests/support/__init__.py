"""The pages that people read: those of the site, and those beside it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PAGES", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
_BUILT = ROOT / "docs" / "_build"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "benchmarks" / "results" / "README.md",
        ROOT / "tests" / "faults" / "README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if _BUILT not in page.parents),
    ]
)
