"""Which processes may bring up a cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dask_gpu_mpi.script.child_processes import RANK_PID, mark_children, refuse_children

WORLD = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
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
