"""An agent up to its part in the job, where that goes wrong; in order: test_handle, test_part."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.agent.handle import AgentProcess, begin_agent
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Kind
from support.jobs.clusters import until

ENVIRON = dict(os.environ)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    """The agent of an environment whose Dask is broken."""
    (tmp_path / "distributed.py").write_text("raise ImportError('no libstdc++')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    agent = AgentProcess(ENVIRON)
    yield agent
    agent.kill()
    agent.close(10.0)


def test_an_environment_that_is_broken_is_reported(broken: AgentProcess) -> None:
    begin_agent(broken, Options(worker_class="distributed.Nanny"), ENVIRON)
    found: list[tuple[Kind, object]] = []
    until(lambda: found.extend(broken.events(0.1)) or broken.lost)
    ((kind, failure),) = found
    assert (kind, broken.exit_text()) == (Kind.FAILED, "exit code 1")
    assert "ImportError: no libstdc++" in str(failure)
