"""What goes wrong before a rank has an agent, and one cluster at a time; the start: tests/mpi, tests/faults/test_starts.py."""

from __future__ import annotations

import errno
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import session as session_module
from dask_gpu_mpi.job import start as module


def test_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(InputError, match=r"sys.executable is '' \(expected the path of a Python program\)"):
        module._start_agent({})


def test_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "AgentProcess", full)
    with pytest.raises(
        StartupError, match="could not start the agent of this rank .Too many open files.. Fix: "
    ):
        module._start_agent({})


def member(*, leave_open: bool = True, over: bool = True, client: bool = True) -> Any:
    """What this process is in its last cluster."""
    return SimpleNamespace(
        leave_open=leave_open,
        ending=SimpleNamespace(state=SimpleNamespace(over=over)),
        joined=SimpleNamespace(start=SimpleNamespace(is_client=client), host="n3", options="options"),
        rank=2,
        channels=SimpleNamespace(size=4),
    )


@pytest.mark.parametrize(
    ("before", "refused"),
    [
        (None, False),
        (member(), False),
        (member(over=False), True),
        (member(leave_open=False), True),
        (member(leave_open=False, over=False), True),
    ],
)
def test_one_cluster_at_a_time(monkeypatch: pytest.MonkeyPatch, before: Any, refused: bool) -> None:
    monkeypatch.setattr(module, "_member", before)
    if refused:
        with pytest.raises(InputError, match=r"called a second time in this job .* Fix: remove this call"):
            module.refuse_second()
    else:
        module.refuse_second()


@pytest.mark.parametrize(
    ("by_command", "closed", "found"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_session_of_the_command(
    monkeypatch: pytest.MonkeyPatch, by_command: bool, closed: bool, found: bool
) -> None:
    session = SimpleNamespace(closed=closed)
    monkeypatch.setattr(session_module, "current_session", lambda: session)
    monkeypatch.setattr(module, "_by_command", by_command)
    monkeypatch.setattr(module, "_member", None)
    assert module.command_session() is None
    monkeypatch.setattr(module, "_member", member())
    assert module.command_session() == ((session, "options") if found else None)
    monkeypatch.setattr(session_module, "current_session", lambda: None)
    assert module.command_session() is None


def test_traceback_of_a_rank_that_is_not_the_clients_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_member", None)
    assert module._label() is None
    monkeypatch.setattr(module, "_member", member())
    assert module._label() is None
    monkeypatch.setattr(module, "_member", member(client=False))
    assert module._label() == "rank 2 of 4 on n3 failed:"
