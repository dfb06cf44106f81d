"""An agent up to its part in the job, where that goes wrong; in order: test_handle, test_part."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.agent import main
from dask_gpu_mpi.agent.handle import AgentProcess, begin_agent
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import StartupError
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


def test_nothing_is_forked_while_ucx_has_half_of_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_import_dask", lambda *, cuda: None)
    monkeypatch.setattr(main, "HOOKS", 0.01)
    in_place = threading.Event()
    hooks = threading.Thread(target=in_place.wait)
    hooks.start()
    try:
        with pytest.raises(StartupError, match="UCX has not put its hooks into CUDA's library within"):
            main.run(-1, Timeline("agent"), rank=1, cuda=True, hooks=hooks, look=None, gpus=None)
    finally:
        in_place.set()
        hooks.join()
