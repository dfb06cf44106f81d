"""The rank's side of an agent: what it imports from, its messages, one that does not end, or has no socket any more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask.config
import pytest

from dask_gpu_mpi.agent import handle
from dask_gpu_mpi.agent.handle import AgentProcess, begin_agent, import_path
from dask_gpu_mpi.agent.hub import connect
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.meeting import listen
from dask_gpu_mpi.startup.messages import Configuration, Entry, Kind
from support.jobs.clusters import alive, until

ENVIRON = dict(os.environ)
CPU = Options(worker_class="distributed.Nanny")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-O", "-bb", "-Wignore", "-X", "dev", "-X", "utf8=1", "-s"],
        ["-OO", "-B", "-W", "ignore::UserWarning", "-E", "-X", "pycache_prefix=/nowhere"],
        ["-P", "-q", "-v", "-S"],
        ["-I", "-d"],
    ],
    ids=" ".join,
)
def test_the_agent_has_the_options_of_the_ranks_interpreter(options: list[str]) -> None:
    """All that a child gets is known to its child, too."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import json; from dask_gpu_mpi.agent.handle import _interpreter_options; "
        "print(json.dumps(_interpreter_options()))"
    )
    show = "import json, sys; print(json.dumps([list(sys.flags), sorted({*sys.warnoptions}), sys._xoptions]))"

    def output(options: list[str], code: str) -> Any:
        return json.loads(subprocess.check_output([sys.executable, *options, "-c", code], timeout=30))

    assert output(output(options, code), show) == output(options, show)


def test_the_agent_imports_from_where_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/lib", Path("/ignored"), "lib\udce4"])
    assert import_path() == [str(tmp_path), "/lib", f"{tmp_path}/lib\udce4"]
    assert json.loads(json.dumps(import_path())) == import_path()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert import_path() == ["/lib", "lib\udce4"]


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    agent = AgentProcess(ENVIRON)
    yield agent
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGKILL)
    agent.close(10.0)


def until_lost(agent: AgentProcess) -> list[tuple[Kind, object]]:
    """All its messages."""
    found: list[tuple[Kind, object]] = []
    until(lambda: found.extend(agent.events(0.1)) or agent.lost)
    return found


def test_what_can_not_be_killed_is_not_waited_for(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a call of the kernel that waits for a dead file system."""
    monkeypatch.setattr(handle, "KILLING", 0.1)
    os.kill(agent.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        agent.close(0.1)
    assert alive(agent.pid)
    assert f"agent (process {agent.pid}) still running 0.1 s after SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("taken", [True, False], ids=["by a file of the script", "closed"])
def test_a_socket_that_is_gone(agent: AgentProcess, taken: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("of the script")
    if taken:
        fd = os.open(path, os.O_RDWR)
        os.dup2(fd, agent.fd)
        os.close(fd)
    else:
        os.close(agent.fd)
    agent.send(Kind.CLOSE)
    assert list(agent.events()) == []
    assert agent.lost
    assert agent.exit_text() == "the script closed the descriptors of this process"
    agent.close(5.0)
    if taken:
        assert os.read(agent.fd, 100) == b"of the script"
        os.close(agent.fd)


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_what_dask_configures_for_processes_is_there_from_the_agents_first_moment(
    agent: AgentProcess,
) -> None:
    """The configuration is read while the first agent imports already: another one takes its place."""
    assert b"\0DGM_TEST=7\0" not in environ_of(agent.pid)
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {"DGM_TEST": 7}}):
        another = begin_agent(agent, CPU, ENVIRON)
    try:
        environ = until(lambda: environ_of(another.pid), 20, "it is just being started")
        assert b"\0DGM_TEST=7\0" in environ
        assert not alive(agent.pid)
    finally:
        another.close(30.0)
    assert another.exit_text() == "exit code 0"


@pytest.mark.parametrize("killed", [True, False])
def test_the_scratch_of_an_agent_that_was_killed_is_removed(
    agent: AgentProcess, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that closes in order has removed it itself."""
    removed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        handle,
        "remove_scratch",
        lambda path, *, within, settle: removed.append((path, 2.0 <= within <= 10.0)),
    )
    agent.scratch = str(tmp_path)
    if killed:
        agent.kill()
    agent.close(10.0)
    assert removed == [(str(tmp_path), True)] * killed
    assert agent.exit_text() == ("killed by signal SIGKILL" if killed else "exit code 0")


@pytest.mark.parametrize("value", [5, "FOO=1", ["FOO"]])
def test_variables_that_are_no_mapping(value: object) -> None:
    said = r"pre-spawn-environ: invalid value .* \(expected names and values\)"
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": value}),
        pytest.raises(InputError, match=said),
    ):
        AgentProcess(ENVIRON)


def test_an_agent_that_is_closed_before_it_is_configured_ends_in_order(agent: AgentProcess) -> None:
    # it began before the options were read
    assert begin_agent(agent, CPU, ENVIRON) is agent
    agent.send(Kind.CLOSE)
    assert until_lost(agent) == []
    assert agent.exit_text() == "exit code 0"


def test_messages_that_are_not_taken_stay(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that closes at once: its end comes with the last message of its start."""
    read = iter([[(Kind.UP, 1), (Kind.STOP, None), (Kind.END, 2)]])
    monkeypatch.setattr(agent._reader, "read", lambda timeout: next(read, []))
    for kind, _ in agent.events():
        assert kind == Kind.UP
        break
    assert list(agent.events()) == [(Kind.STOP, None), (Kind.END, 2)]
    assert list(agent.events()) == []


def test_an_agent_that_can_not_be_configured_says_why_and_ends(agent: AgentProcess) -> None:
    """It gets a class of the script, of no module that it could import, and an option that no nanny has."""

    class Plugin:
        pass

    begin_agent(agent, CPU, ENVIRON)
    agent.configure(Configuration(replace(CPU, worker_options={"no_such": Plugin})))
    ((kind, failure),) = until_lost(agent)
    assert (kind, agent.scratch) == (Kind.FAILED, None)
    assert "no_such" in str(failure)


def test_an_environment_that_is_broken_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "distributed.py").write_text("raise ImportError('no libstdc++')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    broken: AgentProcess = request.getfixturevalue("agent")
    begin_agent(broken, CPU, ENVIRON)
    ((kind, failure),) = until_lost(broken)
    assert (kind, broken.exit_text()) == (Kind.FAILED, "exit code 1")
    assert "ImportError: no libstdc++" in str(failure)


async def test_a_prepared_agent_has_a_scratch_and_leads_with_the_socket_that_it_gets(
    agent: AgentProcess, tmp_path: Path
) -> None:
    begin_agent(agent, CPU, ENVIRON)
    now = time.monotonic()
    options = replace(CPU, local_directory=str(tmp_path))
    agent.configure(Configuration(options, {}, started=now, deadline=now + 60.0))
    config = make_credentials()
    with listen("127.0.0.1") as sock:
        hub = sock.getsockname()[:2]
        agent.send(Kind.ENTER, Entry(0, 2, hub, config, {0: "h", 1: "h"}), fds=[sock.fileno()])
    found: list[tuple[Kind, object]] = []
    until(lambda: found.extend(agent.events(0.1)) or found[1:])
    assert [kind for kind, _ in found] == [Kind.PREPARED, Kind.ENTERED]
    assert agent.scratch is not None
    assert Path(agent.scratch).parent == tmp_path
    connection = await connect(hub, config, 10.0)
    connection.close()
    agent.close(20.0)
    assert list(tmp_path.iterdir()) == []
