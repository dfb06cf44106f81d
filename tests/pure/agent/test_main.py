"""What an agent does with its rank's orders: a real control pipe, and in place of workers and scheduler what notes the calls."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import dask
import pytest

from dask_gpu_mpi.agent import main as module
from dask_gpu_mpi.agent.main import Agent
from dask_gpu_mpi.agent.orders import Answer, Configuration, Order, SchedulerSettings
from dask_gpu_mpi.base.frames import FrameReader, write_frame
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.network.ucx import MESSAGE, MESSAGE_BYTES
from dask_gpu_mpi.options.model import Options, Protocol, Transport, WorkerUcx
from dask_gpu_mpi.plan.model import Start, WorkerPlan

PLAN = WorkerPlan(
    name="a", rank=3, host="h", kind="cpu", gpu_index=None, device=None, nthreads=1, memory_limit=0, cpus=(), resources={}
)  # fmt: skip
START = Start("tcp://h:1", "tcp", "127.0.0.1", (PLAN,), {})
SCHEDULER = SchedulerSettings("127.0.0.1", {}, "token")


class Scheduler:
    def __init__(
        self, timeline: Timeline, on_end: Callable[[int | None], None], on_answer: Callable[..., None]
    ) -> None:
        self.on_end = on_end

    async def start(self, options: Options, settings: SchedulerSettings) -> tuple[Any, ...]:
        return (Answer.SCHEDULER_UP, "tcp://h:1", 8787, "id")

    def send(self, order: Order, payload: Any = None) -> None:
        Bench.now.calls.append(("send", order))

    def close(self, grace: float) -> None:
        Bench.now.calls.append(("close scheduler", grace))


class Workers:
    def __init__(
        self, configuration: Any, scratch: str, timeline: Timeline, on_end: Callable[..., None]
    ) -> None:
        self.closing = False
        self.on_end = on_end
        self.ended = asyncio.Event()

    async def start(self, start: Start) -> None:
        Bench.now.calls.append(("start workers", start))

    async def follow(self) -> bool:
        await self.ended.wait()
        return True

    async def close(self) -> None:
        self.closing = True
        self.ended.set()
        Bench.now.calls.append(("close workers",))


class Bench:
    """An agent, and the rank's ends of its pipes."""

    now: Bench

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Bench.now = self
        self.calls: list[tuple[Any, ...]] = []
        self.watches: list[dict[str, Any]] = []
        self.logs: list[tuple[str, ...]] = []
        self.control_out, self.control = os.pipe()
        reply_out, self.reply = os.pipe()
        self.answers = FrameReader(reply_out)
        monkeypatch.setattr(module, "SchedulerProcess", Scheduler)
        monkeypatch.setattr(module, "Workers", Workers)
        monkeypatch.setattr(
            module, "remove_scheduler_file", lambda *given: self.calls.append(("remove", *given))
        )
        monkeypatch.setattr(module.logs, "log_to_file", lambda *given: self.logs.append(given))
        bench = self

        class Watch:
            def __init__(self, rank: int, deadline: float, **more: Any) -> None:
                bench.watches.append({"rank": rank, "deadline": deadline, **more})

            def begin(self) -> None: ...

        monkeypatch.setattr(module, "StartWatch", Watch)

    def agent(self, own_server: bool = False, **options: Any) -> Any:
        given = Configuration(Options(**{"protocol": Protocol.TCP, **options}), mpi_deadline=9.0)
        reader = FrameReader(self.control_out)
        return Agent(
            given,
            "/scratch",
            reader,
            self.reply,
            Timeline("agent"),
            rank=os.getppid(),
            own_server=own_server,
            tasks_here=False,
        )

    def run(self, *orders: tuple[Order, Any], then: Any = None, **options: Any) -> list[tuple[Any, ...]]:
        """Let it carry out these orders, do what is to be done then, and close its pipe; returns its answers."""

        async def whole() -> None:
            self.running = agent = self.agent(**options)
            task = asyncio.ensure_future(agent.run(list(orders)))
            await asyncio.sleep(0.02)
            if then is not None:
                await then(agent)
                await asyncio.sleep(0.02)
            if self.control >= 0:
                os.close(self.control)
                self.control = -1
            await asyncio.wait_for(task, 20)

        asyncio.run(whole())
        return [frame if frame[0] != Answer.READY else frame[:-1] for frame in self.answers.read(0.0)]


@pytest.fixture
def bench(dask_config: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    for fd in (made.control_out, made.control, made.reply, made.answers.fd):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("order", [Order.JOINED, Order.CLOSE], ids=["end of the pipe", "in words"])
def test_closing_ends_workers_first_and_the_scheduler_last(bench: Bench, order: Order) -> None:
    closed = [("close workers",), ("close scheduler", 2.0)]

    async def look(agent: Any) -> None:
        assert bench.calls == (closed if order == Order.CLOSE else [])

    assert bench.run((order, None), then=look) == [(Answer.WORKERS_CLOSED,)]
    assert bench.calls == closed


def test_a_rank_is_watched_until_it_has_joined_and_starts_something(bench: Bench) -> None:
    async def join(agent: Any) -> None:
        (watch,) = bench.watches
        assert (watch["rank"], watch["deadline"], watch["speaks"]) == (os.getppid(), 9.0, True)
        told = [(watch["over"](), watch["started"]())]
        for order in ((Order.JOINED, None), (Order.START_SCHEDULER, SCHEDULER)):
            write_frame(bench.control, order)
            await asyncio.sleep(0.02)
            told.append((watch["over"](), watch["started"]()))
        assert told == [(False, False), (True, False), (True, True)]

    bench.run(then=join)
    bench.run()
    assert bench.watches[1]["over"]()  # it ends with the agent


def test_nothing_is_told_of_ends_while_it_closes(bench: Bench) -> None:
    async def end(agent: Any) -> None:
        agent._stop.set()
        agent._scheduler.on_end(7)
        agent._workers.on_end("a", "why")

    assert bench.run((Order.JOINED, None), then=end) == [(Answer.WORKERS_CLOSED,)]


def test_orders_come_in_frames(bench: Bench) -> None:
    async def send(agent: Any) -> None:
        for order, payload in (
            (Order.DASHBOARD, None),
            (Order.SCHEDULER_FILE, ("/f", "id")),
            (Order.CLOSE_WORKERS, None),
        ):
            write_frame(bench.control, (order, payload))

    assert bench.run((Order.JOINED, None), then=send) == [(Answer.WORKERS_CLOSED,)] * 2
    assert bench.calls == [
        ("send", Order.DASHBOARD), ("close workers",), ("remove", "/f", "id"), ("close workers",), ("close scheduler", 2.0)
    ]  # fmt: skip


def test_an_order_that_can_not_be_read(bench: Bench) -> None:
    async def send(agent: Any) -> None:
        data = pickle.dumps(1).replace(b"K\x01.", b"cgone\nX\n.")
        os.write(bench.control, struct.pack("<Q", len(data)) + data)

    told, *_ = bench.run((Order.JOINED, None), then=send)
    assert told[0] == Answer.FAILED
    assert "the agent can't read its orders: ModuleNotFoundError" in str(told[1])


@pytest.mark.parametrize("ucx", [WorkerUcx.OFF, WorkerUcx.ALL])
def test_workers_start_and_their_end_is_told(bench: Bench, ucx: WorkerUcx) -> None:
    async def end(agent: Any) -> None:
        agent._workers.on_end("a", "why")
        agent._workers.ended.set()

    order = (Order.START_WORKERS, replace(START, config={"probe": 5}, transport=Transport(ucx)))
    answers = bench.run(order, then=end, log_directory="/logs")
    assert answers == [
        (Answer.READY, 1), (Answer.WORKER_ENDED, "a", "why"), (Answer.WORKERS_ENDED, True), (Answer.WORKERS_CLOSED,)
    ]  # fmt: skip
    assert bench.calls[0] == ("start workers", order[1])
    assert bench.logs == [("/logs", "rank-3-h")]
    assert dask.config.get("scheduler-address") == "tcp://h:1"
    assert dask.config.get("probe") == 5
    assert (dask.config.get(MESSAGE, None) == MESSAGE_BYTES) is (ucx is WorkerUcx.ALL)


@pytest.mark.parametrize(("plans", "log_directory"), [((), "/logs"), ((PLAN,), None)])
def test_no_log_file_without_a_directory_or_workers(
    bench: Bench, plans: Any, log_directory: str | None
) -> None:
    """And none are lost: there are none, or they were told to close."""

    async def end(agent: Any) -> None:
        if plans:
            write_frame(bench.control, (Order.CLOSE_WORKERS, None))
        else:
            agent._workers.ended.set()

    order = (Order.START_WORKERS, replace(START, workers=plans))
    answers = bench.run(order, then=end, log_directory=log_directory)
    assert bench.logs == []
    assert answers == [(Answer.READY, len(plans)), *[(Answer.WORKERS_CLOSED,)] * (1 + len(plans))]


def test_workers_wait_for_ucx_and_their_delay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over UCX the agent initialises it in a thread, without a GPU, while the scheduler starts."""
    calls: list[str] = []
    ready: list[asyncio.Future[None]] = []

    def start(_: Any) -> asyncio.Future[None]:
        ready.append(asyncio.get_running_loop().create_future())
        return ready[0]

    monkeypatch.setattr(module, "hide_gpus", lambda environ: calls.append("hide"))
    monkeypatch.setattr(module, "in_thread", start)
    monkeypatch.setattr(module, "stop_watching_ucx", lambda: calls.append("stop watching"))

    async def later(agent: Any) -> None:
        assert bench.calls == []
        ready[0].set_result(None)
        await asyncio.sleep(0.02)
        assert bench.calls == []
        await asyncio.sleep(0.2)
        assert bench.calls[0][0] == "start workers"

    order = (Order.START_WORKERS, replace(START, delay=0.15))
    bench.run(order, then=later, protocol=Protocol.UCX)
    assert calls == ["hide", "stop watching"]


def test_a_rank_that_is_gone_ends_it_though_others_hold_the_pipe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARENT_INTERVAL", 0.01)

    async def orphaned(agent: Any) -> None:
        await asyncio.sleep(0.05)
        assert not agent._stop.is_set()
        monkeypatch.setattr(module.os, "getppid", lambda: 1 << 30)
        await asyncio.sleep(0.05)
        assert agent._stop.is_set()

    bench.run((Order.JOINED, None), then=orphaned)


def test_a_rank_that_reads_no_answers_is_gone(bench: Bench) -> None:
    os.close(bench.answers.fd)

    async def answer(agent: Any) -> None:
        agent.answer(Answer.PREPARED, "/scratch")
        assert agent._stop.is_set()

    bench.answers = FrameReader(os.open(os.devnull, os.O_RDONLY))
    bench.run((Order.JOINED, None), then=answer)
