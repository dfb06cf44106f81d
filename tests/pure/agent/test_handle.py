"""The rank's side of an agent: what it imports from, one that does not end, or whose pipes the script has closed."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import dask.config
import pytest

from dask_gpu_mpi.agent import handle as supervisor
from dask_gpu_mpi.agent.handle import AgentProcess, _import_path, begin_agent
from dask_gpu_mpi.agent.orders import Answer, Configuration, Order
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from support.jobs.clusters import alive, until

ENVIRON = dict(os.environ)


def test_the_agent_imports_from_where_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/lib", Path("/ignored"), "lib\udce4"])
    assert _import_path() == [str(tmp_path), "/lib", "lib\udce4"]
    assert json.loads(json.dumps(_import_path())) == _import_path()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert _import_path() == ["/lib", "lib\udce4"]


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    agent = AgentProcess(ENVIRON)
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
    agent.close(0.1)
    assert alive(agent.pid)
    assert f"agent (process {agent.pid}) still running 0.1 s after SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("taken", [True, False], ids=["by files of the script", "closed"])
def test_pipes_that_are_gone(agent: AgentProcess, taken: bool, tmp_path: Path) -> None:
    numbers = [agent._stdin, agent._reader.fd]
    for number in numbers:
        path = tmp_path / str(number)
        path.write_text("of the script")
        if taken:
            fd = os.open(path, os.O_RDWR)
            os.dup2(fd, number)
            os.close(fd)
        else:
            os.close(number)
    agent.send(Order.CLOSE)
    assert agent.events() == []
    assert agent.lost
    agent.close(5.0)
    if taken:
        assert [os.read(number, 100) for number in numbers] == [b"of the script"] * 2
        for number in numbers:
            os.close(number)


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_what_dask_configures_for_processes_is_there_from_the_agents_first_moment(
    agent: AgentProcess,
) -> None:
    """The configuration is read while the first agent imports already: another one takes its place."""
    assert b"\0DGM_TEST=7\0" not in environ_of(agent.pid)
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {"DGM_TEST": 7}}):
        another = begin_agent(agent, Options(worker_class="distributed.Nanny"), ENVIRON)
    try:
        environ = until(lambda: environ_of(another.pid), 20, "it is just being started")
        assert b"\0DGM_TEST=7\0" in environ
        assert agent._process.returncode in (0, -signal.SIGKILL)  # it has a second to end
    finally:
        another.close(30.0)
    assert another._process.returncode == 0


@pytest.mark.parametrize("killed", [True, False])
def test_the_scratch_of_an_agent_that_was_killed_is_removed(
    agent: AgentProcess, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that closes in order has removed it itself."""
    removed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        supervisor,
        "remove_scratch",
        lambda path, *, within, settle: removed.append((path, 2.0 <= within <= 10.0)),
    )
    agent.scratch = str(tmp_path)
    if killed:
        agent.kill()
    agent.close(10.0)
    assert removed == [(str(tmp_path), True)] * killed
    assert (agent._process.returncode == 0) is not killed


def test_variables_that_are_no_mapping() -> None:
    said = r"pre-spawn-environ: invalid value .* \(expected names and values\)"
    for value in (5, "FOO=1", ["FOO"]):
        with (
            dask.config.set({"distributed.nanny.pre-spawn-environ": value}),
            pytest.raises(InputError, match=said),
        ):
            AgentProcess(ENVIRON)


def test_answers_that_the_rank_keeps_and_those_it_hands_on(agent: AgentProcess) -> None:
    read, write = os.pipe()
    before, agent._reader = agent._reader, FrameReader(read)
    for answer in (
        (Answer.PREPARED, "/scratch"),
        (Answer.ENDED, "its fork server has died"),
        (Answer.READY, 2, []),
    ):
        write_frame(write, answer)
    os.close(write)
    assert agent.events() == [(Answer.PREPARED, "/scratch"), (Answer.READY, 2, [])]
    assert agent.scratch == "/scratch"
    assert agent.exit_text() == "its fork server has died"
    agent._reader.close()
    agent._reader, agent.scratch = before, None


def test_the_second_frame_has_the_options_and_the_configuration(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Configuration] = []
    monkeypatch.setattr(agent, "_send_classes", sent.append)
    with dask.config.set({"probe": 1}):
        agent.configure(Options(comm=object(), interface="ib0"), speaks=False)
    (frame,) = sent
    assert frame.options == Options(interface="ib0")  # a communicator can't be sent
    assert (frame.dask_config["probe"], frame.speaks, frame.mpi_deadline) == (1, False, math.inf)


def test_an_agent_that_is_closed_before_it_is_configured_ends_in_order(agent: AgentProcess) -> None:
    # it began before the options were read
    assert begin_agent(agent, Options(worker_class="distributed.Nanny"), ENVIRON) is agent
    assert not agent.looks
    agent.send(Order.CLOSE)
    assert agent._process.wait(20) == 0
    agent.close(1.0)
