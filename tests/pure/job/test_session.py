"""A session and the end of its process: what it is told once, and which exception a signal becomes."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import dask
import pytest

from dask_gpu_mpi.errors import ClusterLostError, InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job import session as module
from dask_gpu_mpi.job.api import send_close_signal
from dask_gpu_mpi.job.dask_client import DaskSettings
from dask_gpu_mpi.job.member import Ending
from dask_gpu_mpi.job.session import ScriptCluster, Session
from dask_gpu_mpi.options.model import Options


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """One that does nothing."""
    monkeypatch.setattr(module, "_script_cluster", None)
    monkeypatch.setattr(module, "silence_dask", list)
    plan = SimpleNamespace(workers=(), hosts=())
    cluster = SimpleNamespace(plan=plan, address="tls://nowhere", dashboard=None, config={})
    joined = SimpleNamespace(
        cluster=cluster, rank=0, host="h", environ={}, options=Options(shutdown_timeout=1.0)
    )
    made = Mock(joined=joined, ending=Ending(), had_client=True, leave_open=False)
    made.launcher_gone.return_value = False
    return made


def done(member: Mock) -> list[bool]:
    """Each end of the client that it was told, whether it is the last."""
    return [call.kwargs["final"] for call in member.end.call_args_list]


def make_end(member: Any) -> ScriptCluster:
    return ScriptCluster(member, 0.0, lambda *_: None)


def test_no_session(member: Mock) -> None:
    with pytest.raises(
        InputError, match=r"this process has no cluster .* Fix: run it by `dask-gpu-mpi launch`"
    ):
        module.current_session()
    outcome.retire()
    assert module.session_of_process() is None
    send_close_signal()  # nothing to close
    session = Session(make_end(member))
    assert module.current_session() is module.session_of_process() is session
    send_close_signal()
    assert session.closed


def test_a_cluster_that_a_client_of_this_process_shuts_down(member: Mock) -> None:
    """The hub, which tells the rank, hears of it a moment later."""
    session = Session(make_end(member))
    session._cluster._use = Mock(is_shut_down=False)
    assert not session.closed
    session._cluster._use.is_shut_down = True
    assert session.closed


def test_a_cluster_that_a_client_has_shut_down(member: Mock) -> None:
    """The session knows, and still ends its rank once."""
    session = Session(make_end(member))
    member.ending.stopped = True
    assert session.closed
    for call in (session.client, lambda: session.spmd(print)):
        with pytest.raises(InputError, match="the cluster of this session has ended"):
            call()
    session.close()
    assert done(member) == [False]


def test_a_session_stays_in_its_process(member: Mock) -> None:
    with pytest.raises(InputError, match=r"a Session can't be sent to a task .*get_client\(\)"):
        pickle.dumps(Session(make_end(member)))


@pytest.mark.parametrize("others_go_on", [True, False])
def test_the_end_is_told_once(
    others_go_on: bool, member: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the other ranks go on, a close is their end, and nothing is left to do when this process ends."""
    unregistered: list[Any] = []
    monkeypatch.setattr(module.atexit, "unregister", unregistered.append)
    member.leave_open = others_go_on
    with Session(make_end(member)) as session:
        assert (session.closed, "(open)" in session._repr_html_()) == (False, True)
    session.close()
    assert (session.closed, "(closed)" in session._repr_html_()) == (True, True)
    assert (done(member), len(unregistered)) == ([others_go_on], others_go_on)
    for _ in range(2):
        session._cluster.end()  # at the end of the process
    session.close()
    assert done(member) == ([True] if others_go_on else [False, True])
    assert unregistered == [session._cluster.end]
    assert capsys.readouterr().err.count("ended after") == 1
    with pytest.raises(InputError, match="spmd: the cluster of this session has ended"):
        session.spmd(print)


def test_the_client_of_a_session_is_replaced_when_it_has_closed(
    member: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(make_end(member))
    monkeypatch.setattr(session, "client", lambda **_: Mock(status="running"))
    first: Any = session._own_client()
    assert session._own_client() is first
    first.status = "closed"
    assert session._own_client() is not first
    session.close()


def test_a_report_by_the_session(member: Mock, tmp_path: Path) -> None:
    end = make_end(member)
    reporter: Any = Mock()
    end._reporter = reporter
    Session(end).report(tmp_path / "r.json")
    path = str(tmp_path / "r.json")
    reporter.write_now.assert_called_once_with(path, ("the script runs", None), ask=True)
    end.close()


@pytest.mark.parametrize("report", [None, "report.json"])
def test_a_report_is_written_at_the_end_if_it_was_requested(report: str | None, member: Mock) -> None:
    """Not if the script has written one by `Session.report`."""
    member.joined.options = Options(report=report, shutdown_timeout=1.0)
    end = make_end(member)
    reporter: Any = Mock()
    end._reporter = reporter
    end.close()
    assert reporter.begin.called is (report is not None)
    assert reporter.finish.called


@pytest.mark.parametrize("part", ["_begin_report", "_finish_report"])
def test_an_interrupted_close_ends_the_cluster_and_restores_the_process(
    part: str, member: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    end = make_end(member)
    monkeypatch.setattr(end, part, interrupted)
    end._undo.callback(DaskSettings({"scheduler-address": "tls://nowhere"}).take_back)
    with pytest.raises(KeyboardInterrupt):
        end.close()
    assert (done(member), dask.config.get("scheduler-address", None)) == ([False], None)


def test_a_child_that_the_script_forks_ends_nothing(member: Mock) -> None:
    end = make_end(member)
    session = Session(end)
    pid = os.fork()
    if not pid:
        end.close()
        end.end()
        with contextlib.suppress(InputError):
            session.report("/dev/null/r.json")
            os._exit(8)
        os._exit(len(done(member)) if end.closed else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not end.closed


@pytest.mark.usefixtures("handlers")
def test_a_signal_is_an_exit_unless_the_cluster_is_lost(
    member: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Mock()
    monkeypatch.setattr(module, "Monitor", lambda *_: monitor)
    end = make_end(member)
    with pytest.raises(SystemExit) as ended:
        end.interrupt(15, None)
    assert ended.value.code == 143
    monitor.announce_interrupt.assert_called_once_with()
    for callback, before in ((3, 30.0), (print, "soon"), (print, -5), (print, float("nan"))):
        with pytest.raises(InputError, match="on_walltime: (callback|before): invalid value"):
            end.on_walltime(callback, before)  # type: ignore[arg-type]
    end.on_walltime(lambda: pytest.fail("no checkpoint without a cluster"), 30.0)
    monitor.wake.assert_called_once_with()  # it looks at the clock from now on
    member.ending.lost = "the scheduler"
    with pytest.raises(ClusterLostError, match="the scheduler") as lost:
        end.interrupt(15, None)
    assert lost.value.reported


def test_a_cluster_that_can_not_be_ended_aborts_the_job(
    member: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(member, "end", lambda **_: 1 / 0)
    make_end(member).end()
    assert codes == [1]
    assert "could not end the cluster; aborting the job" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("x"), InputError("x")], ids=repr)
def test_the_excepthook_stays_while_it_has_something_to_report(
    error: Exception | None, lost: bool, member: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost cluster, or an error of ours that is being raised."""
    retired: list[bool] = []
    monkeypatch.setattr(module.outcome, "retire", lambda: retired.append(True))
    end = make_end(member)
    member.ending.lost = "the scheduler" if lost else None
    with contextlib.suppress(Exception), contextlib.ExitStack() as raised:
        raised.callback(end._restore)
        if error is not None:
            raise error
    assert bool(retired) is not (lost or isinstance(error, InputError))
