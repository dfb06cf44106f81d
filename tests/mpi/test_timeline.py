"""The timeline of real jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clusters import COMMAND, Driver
from harness import Mpi

SCRIPT = (
    "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n"
    "from distributed import Client\nwith Client() as client: print(client.submit(sum, [1, 2]).result())\n"
)
RANK = {
    "python",
    "start the agent",
    "import",
    "import mpi4py, MPI_Init",
    "join the ranks",
    "inventory",
    "wait for the agent",
    "wait for the plan and the scheduler",
    "start workers",
    "wait for the other ranks",
    "close workers",
}
AGENT = {"python", "import", "configure", "fork", "close workers"}


def steps(events: Iterable[dict[str, Any]], rank: int, process: str) -> dict[str, dict[str, Any]]:
    """The steps of one process, by name."""
    tids = {
        event["args"]["name"]: event["tid"]
        for event in events
        if event["ph"] == "M" and event["pid"] == rank and event["name"] == "thread_name"
    }
    return {
        event["name"]: event
        for event in events
        if event["ph"] == "X" and event["pid"] == rank and event["tid"] == tids.get(process)
    }


@pytest.mark.mpi
def test_every_rank_tells_every_step(mpirun: Mpi, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = mpirun.run(
        [*COMMAND, "--timeline", path.name, "--cpu-workers", "1", str(script)], 2, timeout=60, cwd=tmp_path
    ).check()
    assert list((tmp_path / "elsewhere").iterdir()) == []  # one file, where the job began
    assert done.stdout == "3\n"
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for rank in (0, 1):
        assert set(steps(events, rank, "rank")) >= RANK
        assert set(steps(events, rank, "agent")) == AGENT
        assert set(steps(events, rank, f"worker {rank}")) == {"make", "start"}
    mine = steps(events, 0, "rank")
    assert set(mine) >= {
        "plan",
        "open the session",
        "the script",
        "wait for the ranks",
        "close the scheduler",
    }
    assert set(steps(events, 0, "scheduler")) == {"start"}
    # One clock: what waits for another step does not end before it.
    ready = steps(events, 0, "worker 0")["start"]
    assert mine["start workers"]["ts"] + mine["start workers"]["dur"] >= ready["ts"] + ready["dur"]
    assert mine["the script"]["ts"] >= ready["ts"] + ready["dur"]
    # Its agent starts before the rank imports anything that takes long.
    assert mine["start the agent"]["ts"] + mine["start the agent"]["dur"] <= mine["import"]["ts"]
    assert mine["import"]["ts"] + mine["import"]["dur"] <= mine["import mpi4py, MPI_Init"]["ts"]


@pytest.mark.mpi
def test_the_end_of_a_cluster_without_a_script(mpirun: Mpi, tmp_path: Path) -> None:
    path, file = tmp_path / "timeline.json", tmp_path / "scheduler.json"
    job = mpirun.start([*COMMAND, "--timeline", str(path), "--scheduler-file", str(file)], 2)
    job.wait_for("2 workers on 1 host", stream="stderr")
    with Driver(file) as driver:
        driver.ask("client.shutdown()")
        job.wait(20).check(0)
    events = json.loads(path.read_text())["traceEvents"]
    assert set(steps(events, 0, "rank")) >= RANK | {"wait for the ranks", "close the scheduler"}
    assert set(steps(events, 1, "rank")) >= RANK | {"serve"}


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_a_file_that_can_not_be_written_is_told_before_anything_starts(mpirun: Mpi, tmp_path: Path) -> None:
    done = mpirun.run([*COMMAND, "--timeline", str(tmp_path / "no" / "t.json")], 2, timeout=60).check(2)
    assert done.stderr.count("the timeline") == 1
    assert "Traceback" not in done.stderr
