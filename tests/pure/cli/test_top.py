"""The command ``top``: which cluster it shows, and what it prints once, without a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import dask
import pytest

from dask_gpu_mpi.cli import live_view
from dask_gpu_mpi.cli.live_view import find_cluster, run_top
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.network.scheduler_file import Target, write_scheduler_file
from dask_gpu_mpi.view.snapshot import snapshot_of
from support.mocks.snapshots import cluster as cluster_of


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Samples without a scheduler."""
    made = Mock(sample=AsyncMock(return_value=snapshot_of(*cluster_of(2, 2), 7.0)))
    monkeypatch.setattr(live_view, "Link", lambda target: made)
    monkeypatch.setattr(live_view, "BETWEEN", 0.0)
    with dask.config.set({"scheduler-address": "tcp://h:1"}):
        yield made


def file_of(tmp_path: Path, address: str) -> str:
    path = str(tmp_path / "scheduler.json")
    write_scheduler_file(path, address, None, "id", {"distributed.comm.require-encryption": True})
    return path


def test_a_file_comes_before_dasks_configuration(tmp_path: Path) -> None:
    path = file_of(tmp_path, "tls://10.0.0.1:5")
    with dask.config.set({"scheduler-address": "tcp://h:1"}):
        assert find_cluster(path) == Target(
            "tls://10.0.0.1:5", {"distributed.comm.require-encryption": True}, ""
        )
        assert find_cluster(None) == Target("tcp://h:1")
    with dask.config.set({"gpu-mpi.scheduler-file": path}):
        assert find_cluster(None).address == "tls://10.0.0.1:5"


def test_once_and_a_cluster_that_is_gone_between_the_samples(
    link: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_top(None, once=True, as_json=False, interval=2.0) == 0
    assert (link.sample.await_count, link.close.call_count) == (2, 1)  # rates are between two
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) > 60
    link.sample.side_effect = ClusterLostError("gone")
    with pytest.raises(ClusterLostError, match="gone"):
        run_top(None, once=True, as_json=False, interval=2.0)
    assert link.close.call_count == 2
    assert logging.getLogger("distributed").isEnabledFor(logging.CRITICAL)
