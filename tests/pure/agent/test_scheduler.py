"""The scheduler's process: the scheduler itself, in this process, over a pipe; and its agent's side."""

from __future__ import annotations

import asyncio
import importlib
import threading
import types
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import dask
import distributed  # its defaults are there before the first test, and stay
import pytest
from distributed.comm.registry import backends

from dask_gpu_mpi.agent import scheduler
from dask_gpu_mpi.agent.scheduler import SchedulerProcess
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.network.listeners import guard_listeners
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.startup.messages import Kind, SchedulerSettings
from dask_gpu_mpi.view.job_watch import JobWatch
from support.jobs.processes import run_python

OPTIONS = Options(protocol=Protocol.TCP, dashboard_address="127.0.0.1:0")
SETTINGS = SchedulerSettings("127.0.0.1", {"probe": 1}, "token")


@pytest.fixture(autouse=True)
def unchanged(dask_config: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scheduler, "hide_gpus", lambda *_, **__: None)
    server = distributed.node.ServerNode
    monkeypatch.setattr(server, "start_http_server", server.start_http_server)
    monkeypatch.setitem(backends, "tls", backends["tls"])
    guard_listeners()  # as its agent before it forks
    monkeypatch.setattr("distributed.versions.error_message", distributed.versions.error_message)
    monkeypatch.setattr("distributed.node.HTTPServer", distributed.node.HTTPServer)
    with warnings.catch_warnings():
        yield


async def nobody(*_: Any) -> None:
    """A visitor of a scheduler that may not have come up."""


def served(
    options: Options,
    *messages: tuple[Kind, Any],
    visit: Callable[..., Awaitable[None]] = nobody,
    settings: SchedulerSettings = SETTINGS,
    told: list[Any] | None = None,
) -> tuple[int, Kind, Any]:
    """What a scheduler ends with, and its first message, when it is visited and gets these messages; or its pipe is closed.

    Its later messages are added to `told`.
    """
    ours, its = Pipe()

    async def run() -> tuple[int, Kind, Any]:
        task = asyncio.ensure_future(scheduler._serve(options, settings, its))
        kind, payload = await asyncio.get_running_loop().run_in_executor(None, ours.recv)
        try:
            await visit(payload)
        finally:
            for message in messages:
                ours.send(message)
            if not messages:
                ours.close()
        code = await asyncio.wait_for(task, 30)
        while told is not None and ours.poll():
            told.append(ours.recv())
        return code, kind, payload

    with its:
        try:
            return asyncio.run(run())
        finally:
            ours.close()


CLOSE = (Kind.CLOSE, None)


@pytest.mark.parametrize(
    ("messages", "listen", "host"),
    [((CLOSE,), "127.0.0.1", "127.0.0.1"), ((), "::1", "[::1]")],
    ids=["told", "pipe closed"],
)
def test_it_serves_until_it_is_told_to_close(messages: tuple[Any, ...], listen: str, host: str) -> None:
    settings = replace(SETTINGS, listen=listen)
    code, kind, (address, http_port, identity) = served(OPTIONS, *messages, settings=settings)
    assert (code, kind) == (0, Kind.SCHEDULER_UP)
    assert address.startswith(f"tcp://{host}:")
    assert http_port > 0
    assert identity.startswith("Scheduler-")
    assert dask.config.get("probe") == 1
    assert dask.config.get("distributed.diagnostics.nvml") is False


@pytest.mark.parametrize("dashboard", [True, False])
def test_once_the_cluster_is_up_it_reports_its_client_and_has_its_dashboard_if_at_all(
    dashboard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it hears of lost workers. What the watch does with it: tests/pure/view."""
    calls: list[Any] = []

    async def attach(of: Any) -> None:
        calls.append("dashboard")

    monkeypatch.setattr(JobWatch, "report_client", lambda watch, report: report())
    monkeypatch.setattr(JobWatch, "give_up", lambda watch, *lost: calls.append(lost))
    monkeypatch.setattr(scheduler, "_attach_dashboard", attach)
    options = replace(OPTIONS, dashboard=dashboard)
    messages = ((Kind.LOST, (["1"], "rank 1 lost")), (Kind.UP, None), CLOSE)
    told: list[Any] = []
    assert served(options, *messages, told=told)[0] == 0
    assert told == [(Kind.CLIENT, None)]
    assert calls == [(["1"], "rank 1 lost"), *["dashboard"] * dashboard]


def test_libraries_of_the_script_are_imported_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = threading.Event()
    import_module = importlib.import_module

    def noted(name: str) -> Any:
        return imported.set() if name == "cudf" else import_module(name)

    async def visit(_: Any) -> None:
        assert await asyncio.to_thread(imported.wait, 30)

    monkeypatch.setattr(importlib, "import_module", noted)
    # without an order: the cluster is not up
    served(OPTIONS, CLOSE, visit=visit, settings=replace(SETTINGS, imports=("cudf",), device="GPU-1"))


def test_a_worker_is_compared_with_each_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask compares it with every worker there is, which at 3,000 takes longer than all the rest of a registration."""
    from distributed import versions
    from distributed.comm import connect

    compared: list[int] = []
    compare = versions.error_message
    registration: dict[str, Any] = {
        "op": "register-worker", "reply": False, "status": "running", "nthreads": 1, "now": 0.0, "resources": {}, "services": {},
        "memory_limit": None, "local_directory": "", "nanny": None, "extra": {}, "stimulus_id": "s",
        "metrics": {"bandwidth": {"total": 1, "workers": {}, "types": {}}, "digests_total_since_heartbeat": {},
                    "memory": 1, "spilled_bytes": {"memory": 0, "disk": 0}},
    }  # fmt: skip

    def counted(scheduler: Any, workers: Any, *rest: Any, **more: Any) -> Any:
        compared.append(len(workers))
        return compare(scheduler, workers, *rest, **more)

    monkeypatch.setattr(versions, "error_message", counted)

    async def visit(up: tuple[str, int | None, str]) -> None:
        address, http_port, _ = up
        assert http_port is None  # without a dashboard
        warnings_, comms = [], []
        for number, version in enumerate(("1", "1", "1", "2")):
            comms.append(comm := await connect(address))
            own = versions.get_versions()
            own["packages"] = {**own["packages"], "numpy": version}
            name = f"tcp://127.0.0.1:{number + 1}"
            await comm.write(
                {**registration, "address": name, "name": name, "server_id": name, "versions": own}
            )
            warnings_.append((await comm.read())["warning"])
        assert compared == [1, 1, 1, 2]
        assert "numpy" in warnings_[3]
        assert warnings_[0] == warnings_[2]
        for comm in comms:
            comm.abort()

    assert served(replace(OPTIONS, dashboard=False), CLOSE, visit=visit)[0] == 0


def test_it_does_not_start_with_a_server_that_asks_for_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[distributed.node.HTTPServer] = []

    class Unguarded(distributed.node.HTTPServer):
        def __init__(self, *_: Any, **__: Any) -> None:
            made.append(self)

    async def stop(*_: Any) -> None:
        made[0].stop()

    monkeypatch.setattr("distributed.node.HTTPServer", Unguarded)
    monkeypatch.setattr(scheduler, "guard_servers", lambda token: None)
    code, kind, failure = served(OPTIONS, visit=stop)
    assert (code, kind) == (1, Kind.FAILED)
    assert "HTTP server of another class" in failure.problem.text


class Pages:
    """A scheduler whose dashboard is to come up, with a number of clients that grows."""

    def __init__(self, *resources: str) -> None:
        self.services = {"dashboard": types.SimpleNamespace(application=None)}
        self.polls = 0
        self.workers = {name: types.SimpleNamespace(resources={name: 1.0}) for name in resources}

    @property
    def clients(self) -> list[int]:
        self.polls += 1
        return [0] * (2 if self.polls > 2 else 1)


@pytest.mark.parametrize(("resource", "named"), [("GPU", True), ("CPU", False)])
def test_the_page_of_the_gpus_is_in_the_navigation(resource: str, named: bool) -> None:
    pages = ["status", "system", "info"]
    module = types.SimpleNamespace(template_variables=lambda scheduler: {"pages": pages})
    for _ in range(2):
        scheduler._name_gpu_page(module, Pages(resource))
    assert pages == (["status", "system", "gpu", "info"] if named else ["status", "system", "info"])


async def test_the_dashboard_waits_for_the_scripts_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connected: list[int] = []

    module = types.SimpleNamespace(connect=lambda application, server, of, prefix: connected.append(of.polls))

    def missing(name: str) -> None:
        raise ImportError("no bokeh")

    monkeypatch.setattr(scheduler.importlib, "import_module", lambda name: module)
    await scheduler._attach_dashboard(Pages())
    assert connected == [3]
    # but not for ever: a script may have none
    monkeypatch.setattr(scheduler, "CLIENT_GRACE", 0.0)
    await scheduler._attach_dashboard(Pages())
    assert connected == [3, 1]
    # one that fails is a warning
    monkeypatch.setattr(scheduler.importlib, "import_module", missing)
    await scheduler._attach_dashboard(Pages())
    assert "no dashboard: ImportError: no bokeh" in caplog.text


def test_the_exit_code_of_the_process() -> None:
    """It ends inside the event loop, which would wait for threads of the dashboard."""
    program = """
import os, threading, time
from dask_gpu_mpi.agent import scheduler

async def serve(result, settings, pipe):
    threading.Thread(target=time.sleep, args=(60,)).start()
    if isinstance(result, int):
        return result
    raise result

scheduler._serve = serve
for result in (0, 3, OSError()):
    if not os.fork():
        scheduler.run_scheduler(result, None, None)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    done = run_python(program)
    assert done.stdout.split() == ["0", "3", "1"]


class Process:
    """What a context makes in place of a process of the fork server."""

    exitcode = 3

    def __init__(self, *, alive: bool = True, ends: bool = True, **_: Any) -> None:
        self.alive, self.ends = alive, ends
        self.calls: list[Any] = []

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        self.calls.append(("join", timeout))
        self.alive = self.alive and not self.ends

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.parametrize(
    ("process", "sent", "calls"),
    [
        (Process(), [CLOSE], [("join", 2.0)]),
        (Process(ends=False), [CLOSE], [("join", 2.0), "kill", ("join", 1)]),
        (Process(alive=False), [], []),
    ],
    ids=["ends", "does not end", "has ended"],
)
def test_it_is_closed_and_killed_if_need_be(process: Process, sent: list[Any], calls: list[Any]) -> None:
    of_agent = SchedulerProcess(Timeline("agent"), print, print)
    of_agent.send(Kind.UP)  # before it is started there is nothing to send to, or to close
    of_agent.close(1.0)
    ours, its = Pipe()
    with ours, its:
        of_agent._process, of_agent._pipe = process, ours
        of_agent.close(2.0)
        assert ([its.recv()] if its.poll() else []) == sent
    assert process.calls == calls


async def test_a_process_that_ends_before_it_listens_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Process):
        def start(self) -> None:
            pass

    ends: list[int | None] = []
    context = types.SimpleNamespace(Pipe=Pipe, Process=Ended)
    monkeypatch.setattr(scheduler, "get_context", lambda kind: context)

    of_agent = SchedulerProcess(Timeline("agent"), ends.append, print)
    answer = await of_agent.start(OPTIONS, SETTINGS)
    of_agent._pipe.close()
    ended = Problem("the scheduler's process ended before it listened", fix="read its output above")
    assert answer == (Kind.FAILED, Failure(ended))
    assert ends == []


async def test_it_may_close_once_its_workers_have_left() -> None:
    of_job = types.SimpleNamespace(workers={"one": None})
    asked = asyncio.Event()
    waiting = asyncio.ensure_future(scheduler._set_without_workers(asked, of_job))
    await asyncio.sleep(3 * scheduler.LEFT_INTERVAL)
    assert not asked.is_set()
    of_job.workers.clear()
    await asyncio.wait_for(waiting, 10)
    assert asked.is_set()
