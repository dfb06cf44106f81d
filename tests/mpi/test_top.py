"""`top` of a real job with GPUs that are emulated: in a terminal (tmux), in a pipe, and of clusters that are not there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import TELL, facts, until, up
from support.jobs.mpi import Mpi
from support.jobs.screens import Tmux
from support.mocks.gpus import GIB, make_gpus

pytestmark = pytest.mark.mpi

GPUS = [
    replace(
        gpu, utilization=10 * place, used=place * GIB, power=100 * place, temperature=50 + place, nvlink=2**30
    )
    for place, gpu in enumerate(make_gpus(4, host="one", memory=80 * GIB), start=1)
]
#: The names of their workers, in the order of the plan.
NAMES = ["0-0", "0-1", "0-cpu-0", "1-2", "1-3"]


@pytest.fixture(scope="module")
def file(detected_mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scheduler file of a job of two ranks, four GPU workers, and a CPU worker, over TLS."""
    mpi = Mpi(detected_mpi.name, detected_mpi.mpirun)
    path = tmp_path_factory.mktemp("cluster") / "scheduler.json"
    try:
        up(mpi, path, 2, "--cpu-workers", "1", workers=5, gpus=GPUS)
        yield path
    finally:
        mpi.close()


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    with Tmux.opened(tmp_path) as opened:
        yield opened


def order(screen: str) -> list[str]:
    """The workers on the screen, from top to bottom."""
    return re.findall(rf"^\S+ +({'|'.join(NAMES)}) ", screen, re.MULTILINE)


def in_pipe(*arguments: str | Path, rc: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dask_gpu_mpi", "top", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == rc, done.stdout + done.stderr
    return done


def test_rows_keys_and_the_terminal_afterwards(file: Path, tmux: Tmux) -> None:
    tmux.top("--scheduler-file", str(file), "--interval", "0.5")
    shown = tmux.wait_for("0-cpu-0")
    assert tmux.drawn
    assert order(shown) == NAMES
    # each worker has the figures of its own GPU
    for place, name in ((1, "0-0"), (2, "0-1"), (3, "1-2"), (4, "1-3")):
        assert re.search(rf" {name} +{place - 1} +{place}0 +{place}\.0/80G +- ", shown), shown
    assert "nodes 1, GPUs 4, workers 5" in shown
    assert max(map(len, shown.splitlines())) <= 80
    tmux.keys("s")
    assert order(tmux.wait_for("sort: USE%")) == ["1-3", "1-2", "0-1", "0-0", "0-cpu-0"]
    tmux.keys("r")
    assert order(tmux.wait_for("sort: USE% reversed")) == ["0-0", "0-1", "1-2", "1-3", "0-cpu-0"]
    node = shown.splitlines()[3].split()[0]
    tmux.keys("n")
    tmux.wait_for(f"node: {node}")
    tmux.keys("N")
    tmux.wait_for("node: all")
    tmux.keys("f")
    assert order(tmux.wait_for("one row per node")) == []
    tmux.keys("q")
    tmux.check_end(0)


def test_power_temperature_and_links_of_each_gpu(file: Path) -> None:
    def rows() -> list[dict[str, Any]]:
        told = json.loads(in_pipe("--scheduler-file", file, "--json").stdout)["rows"]
        return [row for row in told if row["device"]]

    until(lambda: all(row["gpu_nvlink"] for row in rows()), 30, "a second heartbeat")
    found = rows()
    assert [(row["gpu_power"], row["gpu_temperature"]) for row in found] == [
        (100, 51),
        (200, 52),
        (300, 53),
        (400, 54),
    ]
    # both ways; the counter has steps of a KiB, the clocks are not read at the same time
    assert all(2**30 < row["gpu_nvlink"] < 2**32 for row in found), found
    # as far as the GPU reports them
    assert {(row["gpu_slowed"], row["gpu_pcie"]) for row in found} == {(None, None)}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_leaves_the_terminal_as_it_was(name: str, file: Path, tmux: Tmux) -> None:
    tmux.top("--scheduler-file", str(file))
    tmux.wait_for("0-cpu-0")
    number = signal.Signals[name]
    if name == "SIGINT":  # as from the keyboard, which bash tells from a command that has handled it
        tmux.keys("C-c")
        until(lambda: tmux.as_found, 10, "the shell's screen")
        tmux.run("echo code=130; stty -g > after; touch done")
    else:
        tmux.signal(number)
    tmux.check_end(128 + number)


def test_a_narrow_terminal_that_becomes_wide(file: Path, tmux: Tmux) -> None:
    tmux._tmux("resize-window", "-x", "50", "-y", "9")
    tmux.top("--scheduler-file", str(file))
    shown = tmux.wait_for("rows 1-1 of 1")  # the lines are too few for all rows: one of the node
    assert max(map(len, shown.splitlines())) <= 50
    tmux._tmux("resize-window", "-x", "120", "-y", "30")
    tmux.wait_for("SPILL")
    assert order(tmux.wait_for("0-cpu-0")) == NAMES
    tmux.keys("q")
    tmux.check_end(0)


def test_the_cluster_ends_meanwhile(mpirun: Mpi, tmp_path: Path, tmux: Tmux) -> None:
    path = tmp_path / "scheduler.json"
    owner = up(mpirun, path, 1)
    tmux.top("--scheduler-file", str(path), "--interval", "0.5")
    tmux.wait_for("workers 1")
    owner.signal(signal.SIGTERM)
    owner.wait()
    shown = tmux.check_end(0)
    assert "dask_gpu_mpi: top: the cluster has ended" in shown
    assert "WORKER" in shown  # the last table
    assert "error" not in shown
    assert "Traceback" not in shown


@pytest.mark.quick
def test_once_and_json(file: Path) -> None:
    once = in_pipe("--scheduler-file", file, "--once")
    assert order(once.stdout) == NAMES
    assert "\x1b" not in once.stdout
    assert once.stderr == ""
    told = json.loads(in_pipe("--scheduler-file", file, "--json").stdout)
    assert (told["version"], told["time_left"]) == (1, None)
    rows = {row["worker"]: row for row in told["rows"]}
    assert list(rows) == NAMES
    for place, name in enumerate(["0-0", "0-1", "1-2", "1-3"]):
        row = rows[name]
        assert (row["gpu_index"], row["device"]) == (place, GPUS[place].uuid)
        assert (row["gpu_use"], row["gpu_memory"]) == (10 * (place + 1), (place + 1) * GIB)
        assert row["gpu_memory_total"] == 80 * GIB
    assert rows["0-cpu-0"]["gpu_use"] is rows["0-cpu-0"]["device"] is None
    assert {row["status"] for row in rows.values()} == {"running"}
    assert all(row["host_memory"] > 0 for row in rows.values()), rows
    assert all(row["received"] == row["sent"] == 0 for row in rows.values()), rows


def test_a_worker_of_two_gpus_has_a_row_for_each(mpirun: Mpi) -> None:
    """From the script, which has no scheduler file: its cluster is found. It knows the time that is left, too."""
    script = f"""{TELL}
import subprocess
tell(top=json.loads(subprocess.check_output([sys.executable, "-m", "dask_gpu_mpi", "top", "--json"])))
"""
    env = {"SLURM_JOB_END_TIME": "4102444800"}
    done = mpirun.run(script, 1, command=["--gpus-per-worker", "2"], gpus=GPUS, env=env).check()
    told = facts(done)["top"]
    assert [row["worker"] for row in told["rows"]] == ["0-0", "0-0", "0-2", "0-2"]
    assert [row["gpu_use"] for row in told["rows"]] == [10, 20, 30, 40]
    assert [row["gpu_memory"] for row in told["rows"]] == [GIB, 2 * GIB, 3 * GIB, 4 * GIB]
    assert told["time_left"] == pytest.approx(4102444800 - told["time"])
    # what is the worker's own is there once
    assert [row["host_memory"] is None for row in told["rows"]] == [False, True, False, True]
