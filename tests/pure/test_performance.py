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


@pytest.mark.parametrize("page", [PERFORMANCE, MEASUREMENTS], ids=["performance", "measurements"])
def test_every_table_and_picture_that_is_made_is_between_marks(page: str) -> None:
    made = rf"{make_performance.BEGIN}(?:(?!<!--).)*{make_performance.END}"
    by_hand = re.sub(made, "", page, flags=re.DOTALL)
    assert not re.findall(r"<!-- .*|\| --- .*|!\[.*", by_hand)


def test_a_part_without_an_end_is_refused() -> None:
    begin, end = "<!-- made by docs/make_performance.py: gpus -->\n", "<!-- end -->"
    with pytest.raises(ValueError, match="'gpus' has no end"):
        make_performance.filled(f"{begin}text by hand\n{begin}{end}")


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_is_on_the_page_with_a_text_for_those_who_do_not_see_it(name: str) -> None:
    text = re.findall(rf"!\[([^\]]*)\]\(images/perf-{name}.svg\)", PERFORMANCE)
    assert len(text) == 1
    assert len(text[0]) > 80


def test_the_method_has_the_numbers_of_trials() -> None:
    cpu, slurm, gpu = (
        results.load(name)["results"][shape]["dask_gpu_mpi"]["runs"]
        for name, shape in (("startup-openmpi", "2x2"), ("startup-slurm", "2x1"), ("startup-2xH100", "1x2"))
    )
    tasks = len(results.load("overhead")["tasks"]["rounds"])
    runs = [*results.load("transfer-2xH100")["runs"], *results.load("transfer-all-to-all-2xH100")["runs"]]
    rounds = [len(trials) for run in runs for trials in run["seconds"].values()]
    pairs = len(results.load("rapids-2xH100")["pairs"]["merge"])
    text = (
        f"{cpu} of starts on 2 cores (Slurm: {slurm}), {gpu} on 2×H100, {min(rounds)} to {max(rounds)} of transfers, "
        f"{pairs} of dask-cuda's benchmarks, {tasks} of tasks."
    )
    assert text in PERFORMANCE
