from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.supervisor import _import_path


def test_the_agent_imports_from_where_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/lib", Path("/ignored"), "lib\udce4"])
    assert _import_path() == [str(tmp_path), "/lib", "lib\udce4"]
    assert json.loads(json.dumps(_import_path())) == _import_path()


def test_there_is_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/lib"])
    assert _import_path() == ["/lib"]
