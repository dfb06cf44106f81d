"""An agent that dies: how often, and when, it is restarted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.cluster import agent_restarts
from dask_gpu_mpi.cluster.agent_restarts import DELAYS
from dask_gpu_mpi.cluster.member import Member


def test_an_agent_is_started_three_times_again() -> None:
    assert len(DELAYS) == 3
    assert list(DELAYS) == sorted(DELAYS)
    assert DELAYS[0] > 0


def test_an_agent_that_cannot_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another try each time, then the rank is removed; nothing is raised."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    class Channels:
        rank, agent = 1, None
        sent: list[Any]

        def __init__(self) -> None:
            self.sent = []

        def events(self, timeout: float) -> list[Any]:
            return []

        def send(self, *message: Any) -> None:
            self.sent.append(message)

    monkeypatch.setattr(agent_restarts, "start_agent", full)
    channels = Channels()
    joined: Any = SimpleNamespace(
        channels=channels,
        options=SimpleNamespace(log_directory=None),
        environ={},
        host="h1",
        start=SimpleNamespace(workers=("1",)),
    )
    rank = Member(joined, threading.local(), leave_open=False, has_client=True)  # type: ignore[arg-type]
    rank._restarts.lost("the agent of rank 1 on h1 ended (killed)")
    for _ in range(5):
        if rank._restarts.due is not None:
            rank._restarts.due = 0.0
        rank.pump(0.0)
    assert channels.sent == [(0, "workers-ended", (1, True))]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert [text.rpartition(" in ")[2] for text in said[:3]] == ["0.5 s", "2 s", "8 s"]
    assert said[1].endswith("could not be started (Too many open files); restarting it in 2 s")
    assert said[3].endswith("(Too many open files); rank 1 removed, continuing with the other ranks")
