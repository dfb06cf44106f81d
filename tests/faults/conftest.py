"""The fault tier: a folder for each row's files, and a table of what the rows showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs.faults import RESULTS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_TEST_FOLDER", str(tmp_path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print exit code and seconds of each row."""
    if not RESULTS:
        return
    terminalreporter.section("what the rows showed")
    for result in RESULTS:
        terminalreporter.write_line(
            f"{result.mpi:8} {result.row:64} exit code {result.rc:4} {result.seconds:6.1f} s of {result.within:.0f} s"
        )
