"""docs/performance.md, benchmarks/results/README.md and their plots are made from the results of the benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import make_performance
from measured import plots, results

PERFORMANCE, MEASUREMENTS = (page.read_text(encoding="utf-8") for page in make_performance.PAGES)


def test_pages_and_plots_are_current() -> None:
    command = [sys.executable, ROOT / "docs" / "make_performance.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_of_results_has_its_table() -> None:
    marks = re.findall(rf"{make_performance.BEGIN}\w+ of ([\w-]+), ", MEASUREMENTS)
    assert set(marks) == {path.stem for path in results.RESULTS.glob("*.json")}


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_is_on_the_page_with_a_text_for_those_who_do_not_see_it(name: str) -> None:
    text = re.findall(rf"!\[([^\]]*)\]\(images/perf-{name}.svg\)", PERFORMANCE)
    assert len(text) == 1
    assert len(text[0]) > 80
