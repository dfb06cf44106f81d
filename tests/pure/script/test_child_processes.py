"""Which processes may bring up a cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dask_gpu_mpi.script import child_processes
from dask_gpu_mpi.script.child_processes import RANK_PID, mark_children, refuse_children, unmark_children

WORLD = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "_before", None)
    monkeypatch.setenv(RANK_PID, "")
    monkeypatch.delenv(RANK_PID)


def child(**environ: str) -> str:
    """What a child of this process prints that may not bring up a cluster."""
    code = (
        "from dask_gpu_mpi.script.child_processes import refuse_children\n"
        "try:\n    refuse_children()\nexcept ValueError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_of_a_rank_starts_no_cluster() -> None:
    mark_children()
    assert os.environ[RANK_PID] == str(os.getpid())
    refuse_children()  # the rank itself
    assert "called in a child process of rank 1 of 2, which has its cluster already" in child(**WORLD)
    assert child() == ""  # no launcher
    assert child(**WORLD, DGM_RANK_PID="x") == ""
    unmark_children()
    assert child(**WORLD) == ""


@pytest.mark.parametrize("before", [None, "1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv(RANK_PID, before)
    for _ in range(2):  # clusters, one after the other
        mark_children()
        mark_children()
        unmark_children()
        assert os.environ.get(RANK_PID) == before
    unmark_children()
    assert os.environ.get(RANK_PID) == before


def test_the_mark_of_another_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_children()
    monkeypatch.setenv(RANK_PID, str(os.getppid()))  # as in a child that the rank has forked
    unmark_children()
    assert os.environ[RANK_PID] == str(os.getppid())
