"""Which processes may bring up a cluster."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from dask_gpu_mpi.job import child_processes as module
from dask_gpu_mpi.job.child_processes import RANK_PID, ChildrenOfCluster, mark_children, refuse_children

WORLD = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_PID, "")
    monkeypatch.delenv(RANK_PID)


def child(**environ: str) -> str:
    """What a child of this process prints that may not bring up a cluster."""
    code = (
        "from dask_gpu_mpi.job.child_processes import refuse_children\n"
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
    for number in ("x", "²", "1" * 5000):
        assert child(**WORLD, DGM_RANK_PID=number) == ""


def test_children_of_a_cluster_until_it_is_over() -> None:
    before, execs = dict(os.environ), (os.execv, os.execve)
    children = ChildrenOfCluster({"scheduler-address": "tls://h:1"})
    code = "import dask; print(dask.config.get('scheduler-address', None))"
    line = [sys.executable, "-c", code]
    assert subprocess.run(line, capture_output=True, timeout=60).stdout == b"tls://h:1\n"
    assert os.execv is not execs[0]
    children.release()
    children.release()
    assert (dict(os.environ), (os.execv, os.execve)) == (before, execs)


def test_where_they_can_not_find_it_a_warning_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "ClusterFile", full)
    before = dict(os.environ)
    ChildrenOfCluster({"scheduler-address": "tls://h:1"}).release()
    assert dict(os.environ) == before
    said = capsys.readouterr().err
    assert (
        "can't connect with a plain Client(): [Errno 28] No space left on device. Fix: start the job with --sch"
        in said
    )
