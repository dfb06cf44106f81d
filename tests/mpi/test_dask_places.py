"""What Dask's documentation promises of a cluster, on one of two ranks over TLS: each call of a client keeps it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, facts
from support.jobs.mpi import CompletedJob, Mpi
from support.jobs.scripts import script

pytestmark = pytest.mark.mpi

#: Each function is one test's; what it raises is that test's failure.
SCRIPT = script("mpi/scripts/dask_places.py")


@pytest.fixture(scope="module")
def job(detected_mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompletedJob, Path]]:
    """The one job that all tests of this file look at."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "script.py").write_text(SCRIPT)
    data = folder / "data"
    data.mkdir()
    line = [*COMMAND, "--dashboard-address", "127.0.0.1:0", str(folder / "script.py"), str(data)]
    yield detected_mpi.run(line, 2, timeout=110), data
    detected_mpi.close()


@pytest.fixture
def told(job: tuple[CompletedJob, Path]) -> dict[str, Any]:
    """What each function of the script has returned, or its traceback."""
    return facts(job[0])


def test_wait_for_workers(told: dict[str, Any]) -> None:
    found = told["wait_for_workers"]
    assert found["names"] == ["0", "1"]
    assert "2/3" in found["late"]


def test_run_on_scheduler(told: dict[str, Any]) -> None:
    text, kind, pid, workers, *others = told["run_on_scheduler"]
    assert (text, kind, workers) == ("given", "Scheduler", 2)
    assert pid not in others  # neither the script's process nor a worker's


def test_performance_report(told: dict[str, Any], job: tuple[CompletedJob, Path]) -> None:
    assert told["report"] == list(range(1, 11))
    page = (job[1] / "report.html").read_text()
    assert "<title>Dask Performance Report</title>" in page
    assert all(part in page for part in ("Task Stream", "Worker Profile", "Scheduler Profile", "Bandwidth"))
    assert "number of tasks: 10" in page


def test_progress(told: dict[str, Any]) -> None:
    assert told["show_progress"]["done"]
    assert "100% Completed" in told["show_progress"]["text"]


def test_worker_client(told: dict[str, Any]) -> None:
    assert told["nested"] == [14, 14]


def test_upload_file(told: dict[str, Any]) -> None:
    assert told["upload"] == dict.fromkeys(("all", "restarted", "died"), [[1, 2]] * 2)


def test_restart(told: dict[str, Any]) -> None:
    assert told["restart"] == {"names": ["0", "1"], "new": ["0", "1"], "kept": "cancelled", "works": 7}


def test_restarts_that_were_asked_for_count_as_no_deaths(told: dict[str, Any]) -> None:
    assert told["restart_again_and_again"] == ["0", "1"]


def test_retire_workers(told: dict[str, Any], job: tuple[CompletedJob, Path]) -> None:
    """One that is retired stays so; it is neither lost nor restarted, and the job ends well."""
    assert told["retire"] == {"names": ["0"], "moved": 499500, "restarted": ["0"], "works": 3}
    done = job[0].check()
    ours = [line for line in done.stderr.splitlines() if line.startswith("dask_gpu_mpi: ")]
    assert [line for line in ours if re.search("removed|lost|error", line)] == []
    assert "Traceback" not in done.stderr
