"""The client rank's connection to the scheduler: what comes of an answer that is late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Server

from dask_gpu_mpi.base.timeline import RECORD_OPERATION
from dask_gpu_mpi.job import report as module
from dask_gpu_mpi.job.report import Reporter
from dask_gpu_mpi.options.model import Options
from support.jobs.clusters import until
from support.mocks.inputs import gpu, one_host, plan
from support.mocks.snapshots import made_up

ENDED = ("the script ended", 0)


class SlowScheduler:
    """Answers with its record, when it has time, until it is over."""

    def __init__(self) -> None:
        self.job = made_up(1, 1, 3, 1)
        self.loop = asyncio.new_event_loop()
        self.idle, self.over = asyncio.Event(), asyncio.Event()
        self.address = ""
        self.asked = 0
        threading.Thread(target=lambda: self.loop.run_until_complete(self.serve()), daemon=True).start()
        until(lambda: self.address)

    async def serve(self) -> None:
        self.idle.set()
        server = Server({RECORD_OPERATION: self.tell})
        await server.listen("tcp://127.0.0.1:0")
        self.address = server.address
        await self.over.wait()
        await server.close()

    async def tell(self) -> dict[str, Any]:
        self.asked += 1
        await self.idle.wait()
        return self.job.recorder.record()

    def call(self, function: Any) -> None:
        """In its event loop; returns when it is done."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(20)


@pytest.fixture
def scheduler() -> Iterator[SlowScheduler]:
    slow = SlowScheduler()
    yield slow
    with contextlib.suppress(RuntimeError):  # its loop has ended with the test
        slow.loop.call_soon_threadsafe(slow.idle.set)
        slow.loop.call_soon_threadsafe(slow.over.set)


def make(scheduler: SlowScheduler, report: Path | None = None) -> Reporter:
    cluster = SimpleNamespace(
        address=scheduler.address, plan=plan(one_host((gpu(0),))), steps={}, transport="", hosts={}
    )
    options = Options(report=None if report is None else str(report))
    joined: Any = SimpleNamespace(cluster=cluster, options=options, rank=0, environ={})
    return Reporter(joined, None, (), started=100.0, ready=101.0)


@pytest.fixture
def reporter(scheduler: SlowScheduler) -> Iterator[Reporter]:
    made = make(scheduler)
    yield made
    made.close()


def seen(path: Path) -> tuple[bool, int]:
    """Whether the scheduler has answered, and the tasks that the report has."""
    data = json.loads(path.read_text())
    return data["job"]["scheduler_answered"], data["record"]["tasks"]["seen"]


def test_nothing_is_left_of_one_that_has_been_closed(scheduler: SlowScheduler, tmp_path: Path) -> None:
    """In a process that has one cluster after the other; and its session can still write the report."""
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "first.json", tmp_path / "second.json"):
        made = make(scheduler, path)
        assert made.fetch(20)
        for _ in range(2):
            made.close()
        until(lambda: sorted(os.listdir("/proc/self/fd")) == before)  # the scheduler has closed its end
        made.write_now(str(path), ("the session was closed", None), ask=False)
        assert seen(path)[1] == 3


def test_after_an_answer_that_was_too_late_it_asks_again(
    scheduler: SlowScheduler, reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, running = tmp_path / "report.json", ("the script runs", None)
    scheduler.call(scheduler.idle.clear)
    monkeypatch.setattr(module, "CONNECTING", 0.3)
    with pytest.raises(TimeoutError, match=r"session\.report: the scheduler did not answer within 0\.3 s"):
        reporter.write_now(str(path), running, ask=True)
    assert not path.exists()
    scheduler.job.second(20)
    scheduler.call(scheduler.idle.set)
    monkeypatch.setattr(module, "CONNECTING", 20.0)
    reporter.write_now(str(path), running, ask=True)
    assert seen(path) == (True, 23)
    assert scheduler.asked == 2


def test_a_scheduler_that_does_not_answer_at_the_end_is_told(
    scheduler: SlowScheduler,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert reporter.fetch(20.0)
    monkeypatch.setattr(module, "ASKING", 0.5)
    scheduler.call(scheduler.idle.clear)
    path = tmp_path / "report.json"
    reporter.begin(str(path), ENDED, fetch=True)
    reporter.finish()
    assert seen(path) == (False, 3)
    told = capfd.readouterr().err
    assert told.count("warning: the scheduler did not answer within 0.5 s at the end; the report has") == 1
    assert "has its work until " in told
    assert ". Fix: " in told


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_fetched_before_a_shutdown_is_all(
    lost: bool,
    scheduler: SlowScheduler,
    reporter: Reporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The script may interrupt the shutdown, and repeat it; or the scheduler is lost after it has answered."""
    for asked in (1, 2):
        assert reporter.fetch(20.0, last=True)
        assert scheduler.asked == asked
    monkeypatch.setattr(scheduler.job.recorder, "record", dict)  # of another job's scheduler at this address
    assert reporter.fetch(20.0, last=True)
    scheduler.call(scheduler.over.set)
    until(lambda: all(comm.closed() for comm in reporter._scheduler.comms))
    path = tmp_path / "report.json"
    reporter.begin(str(path), ENDED, fetch=not lost, lost=lost)
    reporter.finish()
    assert seen(path) == (not lost, 3)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("path", "imported"), [(Path("r.html"), True), (Path("r.json"), False)])
def test_the_record_is_refreshed_and_what_makes_a_page_is_imported_before_the_end(
    path: Path, imported: bool, scheduler: SlowScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "dask_gpu_mpi.view.report_page"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(module, "PREPARING", 0.0)
    monkeypatch.setattr(module, "REFRESHING", 0.0)
    with contextlib.closing(make(scheduler, path)):
        until(lambda: scheduler.asked >= 3)
        assert (name in sys.modules) is imported
