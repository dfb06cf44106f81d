"""The command ``top``, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dask_gpu_mpi.cli import live_view, main
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import ClusterLostError


def refused(*arguments: str, rc: int) -> str:
    done = CliRunner().invoke(cli, ["top", *arguments])
    assert done.exit_code == rc, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("dask_gpu_mpi: error: ")
    return line


def test_no_cluster() -> None:
    assert "no cluster found" in refused("--once", rc=2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no scheduler file" in refused("--json", "--scheduler-file", str(tmp_path / "none"), rc=2)


def test_no_terminal(tmp_path: Path) -> None:
    assert "--once or --json" in refused("--scheduler-file", str(tmp_path / "none"), rc=2)


def test_the_arguments_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(file: str | None, **told: Any) -> int:
        assert (file, told) == ("x", {"once": False, "as_json": True, "interval": 0.5})
        return 143

    monkeypatch.setattr(live_view, "run_top", run)
    done = CliRunner().invoke(cli, ["top", "--scheduler-file", "x", "--json", "--interval", "0.5"])
    assert (done.exit_code, done.output) == (143, "")


def test_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> int:
        raise ClusterLostError("gone")

    monkeypatch.setattr(live_view, "run_top", run)
    assert refused("--once", rc=1).endswith("gone")


def test_unknown_options_are_refused_without_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["top", "--nothing"])
    assert end.value.code == 2
    assert "No such option" in capfd.readouterr().err


@pytest.mark.parametrize(("command", "forgets"), [("top", 0), ("jobscript", 1)])
def test_the_cluster_of_the_script_that_has_started_it_is_the_one_to_show(
    command: str, forgets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(main, "forget_cluster", lambda: forgotten.append(1))
    CliRunner().invoke(cli, [command, "--json"])
    assert len(forgotten) == forgets
