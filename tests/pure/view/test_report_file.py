"""Where a report can be written, and that it is written whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.view import report_page
from dask_gpu_mpi.view.report_page import check_report, write_report
from support.mocks.snapshots import made_up


@pytest.mark.parametrize("name", ["r.html", "r.HTM", "r.json"])
def test_good_names(name: str, tmp_path: Path) -> None:
    check_report(str(tmp_path / name), "rank 0 on h")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["r", "r.pdf", "r.json.gz", ".html"])
def test_other_kinds(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected FILE.html or FILE.json.*Fix: "):
        check_report(str(tmp_path / name), "rank 0 on h")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"can't be written by rank 0 on h \(No such file or directory\)\. Fix: "
    ):
        check_report(str(tmp_path / "no" / "r.json"), "rank 0 on h")


def test_a_page_needs_bokeh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        InputError, match="needs bokeh, which is not installed on rank 0 on h. Fix: pip install"
    ):
        check_report(str(tmp_path / "r.html"), "rank 0 on h")
    check_report(str(tmp_path / "r.json"), "rank 0 on h")


def test_the_file_before_is_replaced(tmp_path: Path) -> None:
    data = made_up(1, 1, 5, 1).report()
    path = tmp_path / "r.json"
    path.write_text("before")
    write_report(str(path), data)
    assert json.loads(path.read_text()) == data
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
