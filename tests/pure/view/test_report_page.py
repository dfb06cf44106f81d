"""The page of made-up jobs: of one worker and of 64, light and dark, in a browser."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.view import report_data
from dask_gpu_mpi.view.report_data import check_report
from dask_gpu_mpi.view.report_page import (
    MOST_LINES,
    MOST_RANKS,
    NUMBER,
    _tasks,
    _transfers,
    main,
    matrix,
    on_grid,
    over_time,
    page,
)
from support.jobs.screens import TABS as TITLES
from support.jobs.screens import browser
from support.mocks.snapshots import made_up


@pytest.mark.slow
def test_every_tab_in_a_browser(tmp_path: Path) -> None:
    """Of a large job; tests/mpi/test_report.py has small ones."""
    path = tmp_path / "report.html"
    with browser() as chromium:
        path.write_text(page(made_up(16, 4, 1_200, 10).report()))
        tabs = {tab.title: tab for tab in chromium.open(path)}
        assert chromium.style("backgroundColor") == "rgb(255, 255, 255)"
    assert path.stat().st_size < 20_000_000
    assert tuple(tabs) == TITLES
    counts = {title: len(tab.figures) for title, tab in tabs.items()}
    assert counts == {
        "Overview": 0, "Start-up": 1, "GPUs": 3, "Memory & spill": 4, "Tasks": 1, "Task prefixes": 0,
        "Transfers": 2, "Events": 0, "Plan & options": 0,
    }  # fmt: skip
    for tab in tabs.values():
        assert all(marks and min(marks) > 0 for _, marks in tab.figures), tab
        assert tab.painted >= len(tab.figures), tab
    assert "[left out]" in tabs["Events"].text
    first = " ".join(tabs["Overview"].text.split())
    asked = ["Were the GPUs busy?", "Where did the time go?", "What to change", "56 more workers"]
    assert [text for text in asked if text not in first] == []


def sections(data: dict[str, Any]) -> dict[str, str]:
    """The HTML of each tab."""
    text = page(data).replace("&amp;", "&")
    return dict(re.findall(r'<section title="([^"]*)">(.*?)</section>', text, re.DOTALL))


def test_what_is_not_known_is_said_in_every_tab() -> None:
    data = made_up(1, 1, 3, 0).report()
    texts = sections({**data, "record": None, "start": {"left_out": 0, "steps": []}})
    unknown = {title for title, text in texts.items() if "nothing is known" in text}
    assert unknown == set(TITLES) - {"Start-up", "Plan & options"}
    assert "No steps were kept" in texts["Start-up"]
    assert "1 workers arrived between 0.0 and 0.0 s" in sections(data)["Events"]
    data["record"]["series"]["workers"] = {}  # a job that has done nothing
    text = page(data)
    assert 'title="GPUs"' not in text
    for part in ("No task has run", "There were no tasks", "No worker has fetched"):
        assert part in text
    links = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)\s*=\s*[\"']https?:", text)
    assert links == []  # it needs no network


def test_of_many_ranks_the_steps_of_their_agents_are_not_drawn() -> None:
    data = made_up(1, 1, 3, 0).report()
    step = {"host": "h", "name": "import", "begin": 0.0, "end": 1.0}
    processes = ("rank", "agent")
    for ranks, drawn in ((MOST_RANKS, True), (MOST_RANKS + 1, False)):
        data["start"]["steps"] = [
            {**step, "rank": rank, "process": process} for rank in range(ranks) for process in processes
        ]
        text = page(data)
        assert f"rank {ranks - 1} h" in text
        assert (f"rank {ranks - 1} h: agent" in text) is drawn


def test_a_worker_of_several_threads_has_a_lane_for_each() -> None:
    tasks = {
        "names": ["x"], "actions": ["compute", "transfer"], "lanes": [["0-1", 0], ["0-0", 1], ["0-0", 0]], "lane": [0, 1, 2],
        "name": [0, 0, 0], "action": [0, 1, 0], "start": [0.0, 0.0, 0.0], "length": [1.0, 1.0, 1.0],
    }  # fmt: skip
    (figure,) = _tasks(tasks)["figures"]
    shown = figure.renderers[0].data_source.data
    assert shown["row"] == ["0-1", "0-0 thread 1", "0-0 thread 0"]
    assert list(shown["y"]) == [0.5, 1.5, 2.5]  # from the bottom
    assert figure.yaxis[0].major_label_overrides == {0.5: "0-1", 1.5: "0-0 thread 1", 2.5: "0-0 thread 0"}
    assert shown["name"] == ["x", "transfer: x", "x"]


def test_the_rate_of_transfers_whose_time_is_known() -> None:
    row = {"from": "a", "to": "b", "count": 1}
    rows = [{**row, "bytes": 2**21, "seconds": 2.0}, {**row, "bytes": 2**20, "seconds": 0.0}]
    record = {"workers": [], "transfers": {"by": "worker", "rows": rows}}
    assert [each[-1] for each in _transfers(record)["most"]] == ["1.00 MiB", "-"]
    for each in rows:
        each["bytes"] = 0
    assert [each[-1] for each in _transfers(record)["most"]] == ["-", "-"]


def test_texts_are_escaped() -> None:
    job = made_up(1, 1, 3, 1)
    job.watch.warn("worker 0-0 on h1 paused: too much <host> memory in use")
    data = job.report()
    texts = sections(data)
    assert "<td>{&#34;rmm_pool_size&#34;: 0.8}</td>" in texts["Plan & options"]
    overview = texts["Overview"]
    assert ">a warning<" in overview
    assert "s: worker 0-0 on h1 paused: too much &lt;host&gt; memory in use<" in overview
    evil = "</script><script>alert(1)</script>"
    data["job"]["how"] = data["warnings"][0] = data["record"]["events"][0]["why"] = evil
    data["record"]["prefixes"][0]["name"] = data["plan_table"] = evil
    data["options"][0]["value"] = evil
    assert evil not in page(data)


@pytest.mark.slow
def test_each_gpu_of_a_worker_has_a_row_and_what_it_spills_is_shown() -> None:
    job = made_up(1, 1, 3, 0)
    state = next(iter(job.workers.values()))
    first = [10, 2**30, 2**33, 650, 71, 0b110, 900.0, 5e9, 7e9]
    told = {"gpus": [first, [70, 2**31, 2**33]], "spilled": 3 * 2**30}
    state.metrics = {"memory": 1, "spilled_bytes": {"disk": 0}, "gpu_mpi": told}
    job.now += 5
    job.recorder.sample()
    data = job.report()
    text = sections(data)["GPUs"]
    assert re.findall(r"0-0(?: GPU 2)?</td>", text) == ["0-0</td>", "0-0 GPU 2</td>"]
    assert "3.00 GiB" in text
    assert re.search(r"0-0 GPU 2</td>\s*<td>h1</td>\s*<td class=.number.>70</td>", text)
    assert re.search(
        r"650</td>\s*<td class=.number.>71</td>\s*<td class=.number.>0</td>\s*<td>heat \d+ %, hardware", text
    )
    for title in ("spilled from the GPU", "power, W", "temperature", "PCIe, bytes", "NVLink, bytes"):
        assert title in page(data), title


def test_the_program_that_makes_a_page_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = made_up(1, 1, 3, 1).report()
    Path("r.json").write_text(json.dumps(data))
    main(["r.json", "r.html"])
    assert data["job"]["how"] in Path("r.html").read_text()
    assert stat.S_IMODE(Path("r.html").stat().st_mode) == 0o600
    Path("other.json").write_text("[]")
    for source in ("none.json: No such file or directory", "other.json can't be read as a report"):
        with pytest.raises(SystemExit, match="2"):
            main([re.split(": | can", source)[0], "r.html"])
        assert source in capfd.readouterr().err


def test_a_heat_map_shows_gaps_where_they_were() -> None:
    # a sample a second, one of which came late, and a gap of 60 s
    times = [0.0, 1.0, 2.6, 3.0, 63.0, 64.0]
    grid, step = on_grid(times, np.array([[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]]))
    assert step == 1.0
    assert grid.shape == (1, 65)
    assert list(grid[0, [0, 1, 63, 64]]) == [10.0, 11.0, 14.0, 15.0]
    assert not np.isnan(grid[0, :4]).any()
    assert np.isnan(grid[0, 4:63]).all()
    grid, _ = on_grid([0.0, 1.0, 2.0, 1e6], np.array([[1.0, 2.0, 3.0, 4.0]]))
    assert grid.shape[1] <= 2_001  # it is bounded
    assert on_grid([0.0, 3.0], np.array([[1.0, 2.0]]))[1] == 3.0


def test_few_workers_are_lines_many_are_a_heat_map_and_pairs_a_matrix() -> None:
    lines, heat_map = (
        over_time("use", [0.0, 1.0], {str(n): [1.0, 2.0] for n in range(workers)}, NUMBER)
        for workers in (MOST_LINES, MOST_LINES + 1)
    )
    assert {type(each.glyph).__name__ for each in lines.renderers} == {"Line", "Scatter"}
    (image,) = (each.glyph for each in heat_map.renderers)
    assert (type(image).__name__, image.x, image.dw) == ("Image", -0.5, 2.0)
    pairs = matrix("bytes", {("b", "a"): 1.0}, NUMBER)
    assert pairs.xaxis[0].major_label_overrides == {0.5: "a", 1.5: "b"}
    assert pairs.yaxis[0].major_label_overrides == {1.5: "a", 0.5: "b"}


# -- where a report can be written, and that it is written whole


@pytest.mark.parametrize(
    ("name", "bokeh", "told"),
    [
        ("r.HTM", True, ""),
        ("r.json", False, ""),
        (".html", True, "expected FILE.html or FILE.json.*Fix: "),
        (
            "no/r.json",
            True,
            r"^rank 0 on h: the report .* can't be written \(No such file or directory\)\. Fix: ",
        ),
        (
            "r.html",
            False,
            "^rank 0 on h: the report .* needs bokeh, which is not installed. Fix: pip install",
        ),
    ],
)
def test_where_a_report_can_be_written(
    name: str, bokeh: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bokeh:
        monkeypatch.setattr(report_data.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=told) if told else contextlib.nullcontext():
        check_report(str(tmp_path / name), "rank 0 on h")
    assert list(tmp_path.iterdir()) == []
