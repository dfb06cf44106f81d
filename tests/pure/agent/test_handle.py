"""The rank's side of an agent: what it imports from, one that does not end, or whose pipes the script has closed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import alive
from dask_gpu_mpi.agent import handle as supervisor
from dask_gpu_mpi.agent.handle import AgentProcess, _import_path
from dask_gpu_mpi.agent.orders import Order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def test_the_agent_imports_from_where_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/lib", Path("/ignored"), "lib\udce4"])
    assert _import_path() == [str(tmp_path), "/lib", "lib\udce4"]
    assert json.loads(json.dumps(_import_path())) == _import_path()


def test_there_is_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/lib"])
    assert _import_path() == ["/lib"]


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    agent = AgentProcess(os.environ, set())
    kill = agent._process.kill
    yield agent
    kill()
    agent._process.wait(30)


def test_what_can_not_be_killed_is_not_waited_for(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a call of the kernel that waits for a dead file system."""
    monkeypatch.setattr(supervisor, "KILLING", 0.1)
    os.kill(agent.pid, signal.SIGSTOP)
    monkeypatch.setattr(agent._process, "kill", lambda: None)
    assert not agent.close(0.1)
    assert alive(agent.pid)
    assert f"agent (process {agent.pid}) still running 0.1 s after SIGKILL" in capfd.readouterr().err


def test_files_that_got_the_numbers_of_its_pipes_are_left_alone(agent: AgentProcess, tmp_path: Path) -> None:
    numbers = [agent._stdin, agent._reader.fd]
    files = []
    for number in numbers:
        path = tmp_path / str(number)
        path.write_text("of the script")
        fd = os.open(path, os.O_RDWR)
        os.dup2(fd, number)
        os.close(fd)
        files.append(path)
    agent.send(Order.CLOSE)
    assert agent.events() == []
    assert agent.lost
    agent.close(0.0)
    assert [os.read(number, 100) for number in numbers] == [b"of the script"] * 2
    for number in numbers:
        os.close(number)


def test_pipes_that_are_gone(agent: AgentProcess) -> None:
    for number in (agent._stdin, agent._reader.fd):
        os.close(number)
    agent.send(Order.CLOSE)
    assert agent.events() == []
    assert agent.lost
    agent.close(5.0)
