"""One rank's part in the job: a real socket to the rank and a real hub; workers and scheduler are mocks, which note the calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import dask
import pytest

from dask_gpu_mpi.agent import part as module
from dask_gpu_mpi.agent.hub import Connection, Hub, connect, encode, tls_context
from dask_gpu_mpi.agent.part import Part, dashboard_link
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import OptionError, Problem
from dask_gpu_mpi.machine.gpu_probe import Look
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.reachability import Node
from dask_gpu_mpi.network.scheduler_file import write_scheduler_file
from dask_gpu_mpi.network.ucx import MESSAGE, MESSAGE_BYTES
from dask_gpu_mpi.options.model import Options, Protocol, Transport, WorkerUcx
from dask_gpu_mpi.plan import Start, WorkerPlan
from dask_gpu_mpi.startup.meeting import listen
from dask_gpu_mpi.startup.messages import (
    Cluster,
    Configuration,
    Entry,
    Event,
    Kind,
    SchedulerSettings,
)
from support.mocks.inputs import gpu, plan_of, worker_plan

CONFIG = make_credentials()
START = Start("tcp://h:1", "tcp", "127.0.0.1", (worker_plan("a", rank=1),), {"probe": 5}, limit=70.0)
SETTINGS = SchedulerSettings(
    "127.0.0.1",
    {"key": "secret"},
    "",
    device="GPU-x",
    plan=plan_of(worker_plan("0"), warnings=(Problem("of a plan"),)),
)
CLUSTER = Cluster("tcp://h:1", None)
CLOSED, RANK_CLOSED = Event(1, Kind.CLOSED, None), (Kind.CLOSED, None)


class Workers:
    """Notes what is asked of it; `follow` ends when they have ended."""

    address = "tcp://10.0.0.1:5"

    def __init__(self, calls: list[Any], on_end: Callable[..., None]) -> None:
        self.calls, self.on_end = calls, on_end
        self.ended = asyncio.Event()
        self.error: Exception | None = None

    async def start(self, start: Start) -> None:
        self.calls.append(("start workers", start))
        if self.error is not None:
            raise self.error

    async def follow(self) -> bool:
        await self.ended.wait()
        return True

    async def close(self) -> None:
        self.ended.set()
        self.calls.append("close workers")


class Bench:
    """The agent of rank 1 of 2, its rank, and the hub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: What was asked of workers and scheduler.
        self.calls: list[Any] = []
        #: The exit codes with which it would have ended at once.
        self.exits: asyncio.Queue[int] = asyncio.Queue()
        self.logs: list[tuple[str, ...]] = []
        self.rank, self.control = socket.socketpair()
        self._answers, self._frames = FrameReader(self.rank.fileno()), list[Any]()
        self.workers: Any = None
        self.scheduler: Any = None
        self.up = (Kind.SCHEDULER_UP, ("tcp://h:4711", 8787, "Scheduler-1"))

        def workers(*given: Any) -> Workers:
            self.workers = Workers(self.calls, given[-1])
            return self.workers

        def scheduler(timeline: Timeline, on_end: Any, on_message: Any) -> Any:
            made = self.scheduler = Mock(on_end=on_end, on_message=on_message, start=AsyncMock())
            made.start.side_effect = lambda *given: self.up
            made.send.side_effect = lambda *sent: self.calls.append(sent)
            made.close.side_effect = lambda grace: self.calls.append(("close scheduler", grace))
            return made

        monkeypatch.setattr(module, "SchedulerProcess", scheduler)
        monkeypatch.setattr(module, "Workers", workers)
        monkeypatch.setattr(module, "end_left_behind", lambda: None)
        monkeypatch.setattr(module.logs, "log_to_file", lambda *given: self.logs.append(given))
        monkeypatch.setattr(module.os, "kill", lambda *given: self.calls.append(given))
        monkeypatch.setattr(module.os, "_exit", lambda code: self.exits.put_nowait(code))
        monkeypatch.setattr(module, "kill_rank", lambda *given: self.calls.append(given))

    def tell(self, kind: Kind, payload: Any = None, **more: Any) -> None:
        """A message of the rank."""
        write_frame(self.rank.fileno(), (kind, payload), **more)

    async def answer(self) -> tuple[Kind, Any]:
        """The next message to the rank."""
        if not self._frames:
            self._frames += await asyncio.to_thread(self._answers.read, 10.0)
        frame: tuple[Kind, Any] = self._frames.pop(0)
        return frame

    async def heard(self) -> Any:
        """The next message to the hub, but for the steps."""
        while (event := await asyncio.wait_for(self.events.get(), 10))[1] == Kind.STEP:
            pass
        return event

    def send(self, kind: Kind, payload: Any = None) -> None:
        """A message of the hub."""
        self.hub.send(1, kind, payload)

    @contextlib.asynccontextmanager
    async def running(self, *, enters: bool = True, **more: Any) -> AsyncIterator[None]:
        """An agent, which has registered if it `enters`; at the end its rank has ended."""
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.hub = Hub(
            2, lambda *_: None, self.events.put_nowait, lambda *lost: self.events.put_nowait(("lost", *lost))
        )
        sock = listen("127.0.0.1")
        self.address = sock.getsockname()[:2]
        await self.hub.serve(sock, CONFIG)
        self.task = asyncio.ensure_future(self._run(**more))
        try:
            if enters:
                await self.enter()
                assert (await self.heard())[1] == Kind.REGISTRATION
            yield
        finally:
            self.rank.close()
            await asyncio.wait_for(self.task, 20)
            await self.hub.close(1.0)

    async def _run(self, *, seconds: float = 60.0, look: Look | None = None, **options: Any) -> None:
        now = time.monotonic()
        configuration = Configuration(
            Options(**{"protocol": Protocol.TCP, **options}), started=now, deadline=now + seconds
        )
        fd = self.control.fileno()
        self.part = part = Part(
            configuration,
            "/scratch",
            FrameReader(fd),
            fd,
            Timeline("agent"),
            rank=os.getppid(),
            gpu_answer=look,
        )
        await part.run([])

    async def enter(self, **more: Any) -> None:
        self.tell(Kind.ENTER, Entry(1, 2, self.address, CONFIG, **more))
        assert await self.heard() == Event(1, Kind.ENTERED, (1, more.get("again", False)))
        assert await self.answer() == (Kind.ENTERED, None)
        with socket.socket(fileno=self._answers.fds.pop()) as line:  # a copy of the agent's
            assert line.getpeername() == self.address

    async def start(self, start: Start = START) -> None:
        """The workers are there."""
        self.send(Kind.START, start)
        assert await self.answer() == (Kind.START, start.limit)
        assert await self.heard() == Event(1, Kind.READY, ([], "tcp://10.0.0.1:5"))

    async def start_scheduler(self) -> Any:
        """It is there: its address."""
        self.send(Kind.SCHEDULER, SETTINGS)
        _, kind, address = await self.heard()
        assert kind == Kind.ADDRESS
        return address


@pytest.fixture
def bench(dask_config: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    gc.enable()  # which rank 0's agent disables while the cluster starts
    for sock in (made.rank, made.control):
        sock.close()


# -- the way in


async def test_a_rank_registers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "exposed_folder", lambda path: f"/shared of {path}")
    async with bench.running(enters=False, layout="exclusive"):
        await bench.enter()
        source, kind, found = await bench.heard()
        assert (source, kind, found.host) == (1, Kind.REGISTRATION, socket.gethostname())
        assert (found.inventory.rank, found.inventory.world_size, found.has_client) == (1, 2, True)
        assert ("layout", "exclusive") in found.shared_options
        assert any(interface.name == "lo" for interface in found.interfaces)
        warning = str(found.inventory.warnings[-1])
        assert "other users may replace the workers' files in '/shared of /'" in warning
        assert ". Fix: chmod +t /shared of /, or " in warning


def look(*frames: tuple[str, Any]) -> tuple[Look, int]:
    """The answer of the process that inspects the GPUs; and where more would come."""
    read, write = os.pipe()
    for frame in frames:
        write_frame(write, frame)
    return Look(read), write


@pytest.mark.parametrize(
    ("frames", "seconds", "text"),
    [
        ([("input", "no such GPU")], 60.0, "no such GPU"),
        ([("failed", "NVML failed")], 60.0, "NVML failed"),
        ([], 2.05, "NVML did not respond before"),  # two seconds are left for the report
        ([("seen", (gpu(0),))], 60.0, ""),
    ],
)
async def test_gpus_are_seen_or_why_not_is_reported(
    bench: Bench, frames: list[tuple[str, Any]], seconds: float, text: str
) -> None:
    found, write = look(*frames)
    began = time.monotonic()
    try:
        async with bench.running(enters=False, look=found, seconds=seconds, startup_timeout=20.0):
            await bench.enter()
            _, kind, payload = await bench.heard()
            if text:
                assert kind == Kind.FAILED
                start = f"rank 1 of 2 on {socket.gethostname()}: {text}"
                assert payload.problem.text.startswith(start)
                assert payload.exit_code == (2 if text.startswith("no such") else 1)
            else:
                assert [each.uuid for each in payload.inventory.gpus] == ["GPU-0000"]
            assert time.monotonic() - began < 2
        assert found.fd == -1
    finally:
        os.close(write)


@pytest.mark.parametrize("why", ["Connect call failed", "certificate", "no answer in time"])
async def test_a_hub_that_is_not_reached_is_reported_to_the_rank(bench: Bench, why: str) -> None:
    """Until the deadline, or for a second."""
    async with bench.running(enters=False, seconds=0.1):
        deaf = socket.create_server(("127.0.0.1", 0))
        config = make_credentials() if why == "certificate" else CONFIG
        address = bench.address if why == "certificate" else deaf.getsockname()[:2]
        if why.startswith("Connect"):
            deaf.close()
        bench.tell(Kind.ENTER, Entry(1, 2, address, config))
        kind, failure = await bench.answer()
        assert kind == Kind.FAILED
        at = f"could not reach rank 0 at 127.0.0.1:{address[1]}: "
        assert failure.problem.text.startswith(at)
        assert why in failure.problem.text
        assert bench.events.empty()
        deaf.close()


@pytest.mark.parametrize("workers", [True, False])
async def test_another_agent_of_a_rank_waits_for_the_order_to_start(bench: Bench, workers: bool) -> None:
    """If its workers are gone for good, it tells that, and starts none."""
    async with bench.running(enters=False):
        await bench.enter(again=True, workers=workers)
        if workers:
            await bench.start()
        else:
            assert await bench.heard() == Event(1, Kind.WORKERS_ENDED, True)
            bench.send(Kind.START, START)  # sent before that has come
            assert (await bench.heard()).kind == Kind.READY
            assert bench.calls == []


@pytest.fixture
def closed() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


async def test_no_worker_starts_without_the_scheduler_and_workers_of_other_nodes_are_connected_to(
    bench: Bench, closed: str
) -> None:
    async with bench.running():
        bench.send(Kind.CONNECT, (Node("h2", 2, closed),))
        assert await bench.heard() == Event(1, Kind.REACHED, {"Connection refused": ["h2"]})
        bench.send(Kind.START, replace(START, address=closed, scheduler="rank 0 on h1"))
        _, kind, failure = await bench.heard()
        assert (kind, failure.exit_code) == (Kind.FAILED, 2)
        where = closed.partition("://")[2]
        text = f"could not reach the scheduler at {where} (rank 0 on h1): Connection refused"
        assert failure.problem.text == text
        assert bench.calls == []


# -- the scheduler


async def test_the_scheduler_and_its_file(bench: Bench, tmp_path: Path) -> None:
    """The file goes when the cluster does."""
    path = tmp_path / "scheduler.json"
    options = {
        "scheduler_file": str(path),
        "dashboard_address": ":8787",
        "warnings": (Problem("of an option"),),
    }
    async with bench.running(protocol=Protocol.TLS, **options):
        address, link = await bench.start_scheduler()
        ((_, settings),) = [call.args for call in bench.scheduler.start.call_args_list]
        assert SETTINGS.plan is not None
        plan = replace(SETTINGS.plan, warnings=(Problem("of an option"), Problem("of a plan")))
        assert settings == replace(SETTINGS, token=settings.token, plan=plan)
        assert len(settings.token) >= 43  # 32 bytes
        assert address == "tcp://h:4711"
        assert link == f"http://{socket.gethostname()}:8787/status?token={settings.token}"
        written = json.loads(path.read_text())
        assert (written["address"], written["dask-gpu-mpi"]["dashboard"]) == (address, link)
        bench.send(Kind.UP, CLUSTER)  # the rank removes it, should the agent be killed
        assert await bench.answer() == (Kind.UP, (CLUSTER, False, True, (str(path), "Scheduler-1")))
        assert bench.calls == [(Kind.UP,)]  # the dashboard may follow
        bench.send(Kind.STOP)
        await bench.heard()
        assert not path.exists()


@pytest.mark.parametrize("way", ["tls", "tcp", "ended"])
async def test_a_scheduler_file_of_a_job_that_still_runs(
    bench: Bench, tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "scheduler.json", make_credentials()
    visits = asyncio.Event()

    def visit(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        visits.set()

    context = tls_context(config, server=True) if way == "tls" else None
    server = await asyncio.start_server(visit, "127.0.0.1", 0, ssl=context)
    address = f"{way.replace('ended', 'tcp')}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    write_scheduler_file(str(path), address, 8787, "Scheduler-0", config if way == "tls" else {})
    if way == "ended":
        server.close()
    async with bench.running(scheduler_file=str(path)):
        assert await bench.start_scheduler() == ("tcp://h:4711", "http://localhost:8787/status")
        assert json.loads(path.read_text())["address"] == "tcp://h:4711"
        if way != "ended":
            await asyncio.wait_for(visits.wait(), 10)
        for _ in range(100):
            if way == "ended" or (said := capsys.readouterr().err):
                break
            await asyncio.sleep(0.02)
        if way != "ended":
            assert f"the scheduler file {str(path)!r} is now of this job; the job that had written it" in said
            assert f"at {address}, still runs. Fix: another file" in said
    server.close()
    assert capsys.readouterr().err == ""


async def test_a_cluster_without_encryption_is_open(bench: Bench) -> None:
    async with bench.running(dashboard_address="127.0.0.1:0"):
        assert await bench.start_scheduler() == ("tcp://h:4711", "http://localhost:8787/status")


async def test_a_scheduler_that_does_not_start(bench: Bench) -> None:
    failure = Failure(Problem("port in use"), 2)
    bench.up = (Kind.FAILED, failure)  # type: ignore[assignment]
    async with bench.running():
        bench.send(Kind.SCHEDULER, SETTINGS)
        assert await bench.heard() == Event(1, Kind.FAILED, failure)


@pytest.mark.parametrize(
    ("code", "lost"), [(9, "the scheduler's process ended (exit code 9)"), (0, None)], ids=str
)
async def test_a_scheduler_that_ends(bench: Bench, code: int, lost: str | None) -> None:
    """With 0 if a client has called shutdown(). When it may, that is no news."""
    async with bench.running():
        await bench.start_scheduler()
        bench.scheduler.on_message(Kind.CLIENT, None)
        assert await bench.heard() == Event(1, Kind.CLIENT, None)
        bench.scheduler.on_end(code)
        assert await bench.heard() == Event(1, Kind.OVER, (False, lost, None))
        bench.send(Kind.STOP)
        assert await bench.answer() == (Kind.STOP, None)
        assert await bench.heard() == Event(1, Kind.CLOSED, None)
        bench.scheduler.on_end(code)
        bench.tell(Kind.SIGNAL, 15)
        assert await bench.heard() == Event(1, Kind.SIGNAL, 15)


@pytest.mark.parametrize(
    ("address", "port", "link"),
    [
        ("127.0.0.1:8787", 8788, "http://localhost:8788/status?token=abc"),
        (":8787", 8787, "http://h:8787/status?token=abc"),
        ("10.0.0.1:0", 4711, "http://10.0.0.1:4711/status?token=abc"),
        (":8787", None, None),
    ],
)
def test_the_link_to_the_dashboard(address: str, port: int | None, link: str | None) -> None:
    assert dashboard_link(Options(dashboard_address=address), "h", port, "abc") == link


# -- workers


@pytest.mark.parametrize(
    ("ucx", "worker", "large"),
    [
        (WorkerUcx.OFF, worker_plan("a", rank=1), False),
        (WorkerUcx.ALL, worker_plan("a", rank=1), True),
        (WorkerUcx.OFF, worker_plan("a", "GPU-1", rank=1), True),  # over streams
    ],
)
async def test_workers_start_and_their_ends_are_reported(
    bench: Bench, ucx: WorkerUcx, worker: WorkerPlan, large: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    start = replace(START, workers=(worker,), transport=Transport(ucx), delay=0.2)
    async with bench.running(log_directory="/logs"):
        began = time.monotonic()
        await bench.start(start)
        assert time.monotonic() - began > 0.19
        assert bench.calls == [("start workers", start)]
        bench.workers.on_end("a", "why")
        assert await bench.heard() == Event(1, Kind.WORKER_ENDED, ("a", True))
        bench.workers.on_end("b", None)
        assert await bench.heard() == Event(1, Kind.WORKER_ENDED, ("b", False))
        bench.workers.ended.set()
        assert await bench.heard() == Event(1, Kind.WORKERS_ENDED, True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"worker a on {socket.gethostname()} removed: why")
    assert bench.logs == [("/logs", "rank-1-h")]
    assert dask.config.get("scheduler-address") == "tcp://h:1"
    assert dask.config.get("probe") == 5
    assert (dask.config.get(MESSAGE, None) == MESSAGE_BYTES) is large


async def test_a_rank_without_workers_is_ready_at_once(bench: Bench) -> None:
    """And has lost none."""
    async with bench.running(log_directory="/logs"):
        bench.workers.ended.set()
        await bench.start(replace(START, workers=()))
        bench.send(Kind.UP, CLUSTER)
        assert await bench.answer() == (Kind.UP, (CLUSTER, False, False, None))
    assert await bench.heard() == Event(1, Kind.GONE, None)
    assert (bench.logs, bench.calls[0]) == ([], "close workers")


@pytest.mark.parametrize("up", [False, True])
async def test_workers_that_do_not_start(bench: Bench, up: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster does not start; later, with another agent of its rank, this one ends itself, and the rank starts another."""
    async with bench.running(enters=False):
        await bench.enter(again=up)
        bench.workers.error = OptionError("no_such")
        if not up:
            assert (await bench.heard())[1] == Kind.REGISTRATION
        bench.send(Kind.START, START)
        assert await bench.answer() == (Kind.START, 70.0)
        if up:
            assert await asyncio.wait_for(bench.exits.get(), 10) == 1
        else:
            assert await bench.heard() == Event(1, Kind.FAILED, Failure.of(OptionError("no_such")))
    said = f"dask_gpu_mpi: an agent on {socket.gethostname()} failed: no_such\n"
    assert capsys.readouterr().err == (said if up else "")


# -- what is passed on


async def test_messages_for_the_rank_and_for_the_hub(bench: Bench) -> None:
    async with bench.running():
        up, client = replace(START, is_client=True), replace(CLUSTER, dashboard="link")
        await bench.start(up)
        for kind, payload, answer in (
            (Kind.UP, client, (client, True, False, None)),
            (Kind.CLIENT, None, None),
            (Kind.SIGNAL, 15, 15),
            (Kind.LOST, (["0"], "text"), ...),  # for the scheduler
            (Kind.RELEASE, None, ...),
            (Kind.BUSY, None, None),
            (Kind.FAIL, (Failure(Problem("no disk")), True), (Failure(Problem("no disk")), True)),
        ):
            bench.send(kind, payload)
            if answer is not ...:
                assert await bench.answer() == (kind, answer)
        for kind, payload in ((Kind.SIGNAL, 2), (Kind.BUSY, None), (Kind.OVER, (True, None, 75))):
            bench.tell(kind, payload)
            assert await bench.heard() == Event(1, kind, payload)
        bench.tell(Kind.FAILED, (1, Failure(Problem("SIGTERM"), 143)))
        assert await bench.heard() == Event(1, Kind.FAILED, Failure(Problem("SIGTERM"), 143))
        # without a scheduler there is no dashboard that could follow
        assert [call for call in bench.calls if isinstance(call[0], Kind)] == [(Kind.LOST, (["0"], "text"))]


# -- the end


async def test_the_cluster_is_over_and_then_the_job(bench: Bench) -> None:
    """Workers close first; the scheduler when they have left it, at the latest when all ranks' have closed."""
    async with bench.running():
        await bench.start_scheduler()
        await bench.start()
        bench.calls.clear()
        bench.send(Kind.STOP, "no worker is left")
        assert await bench.answer() == (Kind.STOP, "no worker is left")
        assert await bench.heard() == CLOSED  # and nothing of workers that have ended
        bench.workers.on_end("a", "why")
        assert bench.calls == [(Kind.STOP,), "close workers"]
        bench.send(Kind.RELEASE)
        assert await bench.answer() == RANK_CLOSED
        assert bench.calls == [(Kind.STOP,), "close workers", ("close scheduler", 2.0)]
        bench.send(Kind.END, (75, 15))
        assert [await bench.answer() for _ in range(3)] == [
            (Kind.END, (75, 15)),
            RANK_CLOSED,
            (Kind.ENDED, 0),
        ]
        assert await bench.heard() == CLOSED
    assert await bench.heard() == ("lost", 1)  # but it is not GONE
    assert bench.calls.count("close workers") == 2  # the second time there are none


async def test_a_scheduler_that_is_not_released_closes_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "closing_time", lambda options, environ: -2.0)
    monkeypatch.setattr(module, "closing_slack", lambda _: 0.1)
    async with bench.running():
        await bench.start_scheduler()
        began = time.monotonic()
        bench.send(Kind.STOP)
        assert [await bench.answer(), await bench.answer()] == [(Kind.STOP, None), RANK_CLOSED]
        assert time.monotonic() - began > 0.09
        assert ("close scheduler", 2.0) in bench.calls


@pytest.mark.parametrize("word", [Kind.CLOSE, None], ids=["in words", "end of the socket"])
async def test_a_rank_that_ends_takes_its_part_with_it(bench: Bench, word: Kind | None) -> None:
    async with bench.running():
        await bench.start()
        bench.send(Kind.BUSY)
        assert await bench.answer() == (Kind.BUSY, None)
        if word is not None:
            bench.tell(word)
        else:
            bench.rank.close()
        assert await bench.heard() == Event(1, Kind.GONE, None)
        assert await bench.heard() == ("lost", 1)
    assert bench.calls[1:] == ["close workers", ("close scheduler", 2.0)]


async def test_an_order_that_comes_with_the_end_is_not_begun(bench: Bench) -> None:
    """Without a warning of Python's: nobody has awaited it."""

    async def order() -> None:
        raise AssertionError

    async with bench.running():
        asyncio.get_running_loop().call_soon(bench.part._begin, order())
        bench.part._stop.set()
        await asyncio.wait_for(asyncio.shield(bench.task), 10)
    gc.collect()


async def test_a_rank_that_is_gone_though_others_hold_the_socket(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARENT_INTERVAL", 0.01)
    async with bench.running():
        await bench.start()
        monkeypatch.setattr(module.os, "getppid", lambda: 1 << 30)
        assert await bench.heard() == Event(1, Kind.GONE, None)


async def test_a_rank_that_reads_no_messages_is_gone(bench: Bench) -> None:
    async with bench.running():
        bench.rank.shutdown(socket.SHUT_RD)
        bench.send(Kind.BUSY)
        await asyncio.wait_for(asyncio.shield(bench.task), 10)


async def test_the_hub_is_lost(bench: Bench) -> None:
    """And with it rank 0, and the job."""
    async with bench.running():
        await bench.start()
        await bench.hub.close(1.0)
        assert [await bench.answer() for _ in range(3)] == [(Kind.GONE, False), RANK_CLOSED, (Kind.ENDED, 0)]


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_rank_that_stays_stopped_is_continued_and_then_killed(
    bench: Bench, stopped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher would wait for it. A program that runs continues after its cluster."""
    monkeypatch.setattr(module, "is_stopped", lambda pid: stopped and pid == os.getppid())
    for name in ("RANK_PATIENCE", "KILLING"):
        monkeypatch.setattr(module, name, 0.05)
    async with bench.running():
        bench.send(Kind.END, (0, None))
        await asyncio.wait_for(asyncio.shield(bench.task), 10)
    calls = [(os.getppid(), signal.SIGCONT), (os.getppid(),)]
    assert [each for each in bench.calls if each in calls] == calls * stopped
    said = capsys.readouterr().err
    for name in ("SIGCONT", "SIGKILL"):
        line = f"warning: rank 1 on {socket.gethostname()} does not end; it is sent {name}. Fix: "
        assert (line in said) is stopped


async def test_a_rank_that_is_not_needed_is_not_told_that_the_hub_has_gone(bench: Bench) -> None:
    async with bench.running():
        bench.send(Kind.DONE, 0)
        assert await bench.answer() == (Kind.DONE, 0)
        await bench.hub.close(1.0)
        waiting = asyncio.ensure_future(bench.answer())
        assert (await asyncio.wait([waiting], timeout=0.2))[0] == set()
        write_frame(bench.control.fileno(), "last")
        assert await waiting == "last"


# -- rank 0, whose agent leads the job


async def test_rank_0_alone_from_the_start_to_the_end(bench: Bench) -> None:
    async with bench.running(enters=False):
        bench.tell(Kind.ENTER, Entry(0, 1, ("", 0), CONFIG, {0: "h"}))
        assert [kind for kind, _ in [await bench.answer() for _ in range(2)]] == [Kind.ENTERED, Kind.START]
        kind, (cluster, is_client, has_scheduler, _) = await bench.answer()
        assert (kind, cluster.address, is_client, has_scheduler) == (Kind.UP, "tcp://h:4711", True, True)
        bench.tell(Kind.OVER, (True, None, 75))
        assert [await bench.answer() for _ in range(3)] == [
            (Kind.END, (75, None)),
            RANK_CLOSED,
            (Kind.ENDED, 0),
        ]
        await asyncio.wait_for(asyncio.shield(bench.task), 10)


@contextlib.asynccontextmanager
async def led(bench: Bench) -> AsyncIterator[Connection]:
    """The agent leads a job of two ranks; the connection of the other agent."""
    with listen("127.0.0.1") as sock:
        address = sock.getsockname()[:2]
        bench.tell(Kind.ENTER, Entry(0, 2, address, CONFIG, {0: "h0", 1: "h1"}), fds=[sock.fileno()])
    one = await connect(address, CONFIG, 10.0)
    one.send(encode(Kind.ENTERED, (1, False)))
    yield one
    one.close()


async def test_rank_0_fails_before_it_leads_and_spreads_the_report(bench: Bench) -> None:
    failure = Failure(Problem("no disk"), 2)
    async with bench.running(enters=False):
        bench.tell(Kind.FAILED, (0, failure))
        async with led(bench) as one:
            bench.tell(Kind.FAILED, (1, failure))  # of a rank whose agent is not connected
            found = [await bench.answer(), await bench.answer()]
            assert found == [(Kind.ENTERED, None), (Kind.FAIL, (failure, False))]
            bench.tell(*found[1])
            assert await one.receive() == found[1]
        assert await bench.answer() == (Kind.ENDED, 0)  # nobody is left


@pytest.mark.parametrize("killed", [True, False])
async def test_the_job_ends_with_rank_0(bench: Bench, killed: bool) -> None:
    async with bench.running(enters=False), led(bench) as one:
        if killed:
            bench.rank.close()
        else:
            bench.tell(Kind.CLOSE)
        with pytest.raises(EOFError):
            await one.receive()
