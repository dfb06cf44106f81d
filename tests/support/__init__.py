"""What the tests share: jobs, the test bed, mocks and intruders; here the places of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "ci" / "testbed"
_BUILT = ROOT / "docs" / "_build"
#: The pages that people read: those of the site, and those outside it.
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "contributing").glob("*.md"),
        ROOT / "benchmarks" / "results" / "README.md",
        ROOT / "tests" / "faults" / "README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if _BUILT not in page.parents),
    ]
)
