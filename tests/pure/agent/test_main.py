"""What an agent does with its rank's orders: a real control pipe, and in place of workers and scheduler what notes the calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

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


class Workers:
    """Notes what is asked of it; `follow` ends when they have ended."""

    def __init__(self, calls: list[tuple[Any, ...]], on_end: Callable[..., None]) -> None:
        self.closing = False
        self.calls, self.on_end = calls, on_end
        self.ended = asyncio.Event()

    async def start(self, start: Start) -> None:
        self.calls.append(("start workers", start))

    async def follow(self) -> bool:
        await self.ended.wait()
        return True

    async def close(self) -> None:
        self.closing = True
        self.ended.set()
        self.calls.append(("close workers",))


class Bench:
    """An agent, and the rank's ends of its pipes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.watches: list[dict[str, Any]] = []
        self.logs: list[tuple[str, ...]] = []
        self.said: list[tuple[Any, ...]] = []
        self.control_out, self.control = os.pipe()
        reply_out, self.reply = os.pipe()
        self.answers = FrameReader(reply_out)

        def scheduler(timeline: Timeline, on_end: Any, on_answer: Any) -> Any:
            made = Mock(
                on_end=on_end, start=AsyncMock(return_value=(Answer.SCHEDULER_UP, "tcp://h:1", 8787, "id"))
            )
            made.send.side_effect = lambda order, payload=None: self.calls.append(("send", order))
            made.close.side_effect = lambda grace: self.calls.append(("close scheduler", grace))
            return made

        def watch(rank: int, deadline: float, **more: Any) -> Any:
            self.watches.append({"rank": rank, "deadline": deadline, **more})
            return Mock()

        monkeypatch.setattr(module, "SchedulerProcess", scheduler)
        monkeypatch.setattr(module, "Workers", lambda *given: Workers(self.calls, given[-1]))
        monkeypatch.setattr(module, "StartWatch", watch)
        monkeypatch.setattr(
            module, "remove_scheduler_file", lambda *given: self.calls.append(("remove", *given))
        )
        monkeypatch.setattr(module.logs, "log_to_file", lambda *given: self.logs.append(given))

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
        )

    @contextlib.asynccontextmanager
    async def running(self, *orders: tuple[Order, Any], **options: Any) -> AsyncIterator[Any]:
        """One that has carried out these orders; at the end its pipe is closed, and `said` are its answers."""
        agent = self.agent(**options)
        task = asyncio.ensure_future(agent.run(list(orders)))
        await asyncio.sleep(0.02)
        yield agent
        await asyncio.sleep(0.02)
        if self.control >= 0:
            os.close(self.control)
            self.control = -1
        await asyncio.wait_for(task, 20)
        frames = self.answers.read(0.0)
        self.said = [frame if frame[0] != Answer.READY else frame[:-1] for frame in frames]


@pytest.fixture
def bench(dask_config: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    for fd in (made.control_out, made.control, made.reply, made.answers.fd):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("order", [Order.JOINED, Order.CLOSE], ids=["end of the pipe", "in words"])
async def test_closing_ends_workers_first_and_the_scheduler_last(bench: Bench, order: Order) -> None:
    closed = [("close workers",), ("close scheduler", 2.0)]
    async with bench.running((order, None)):
        assert bench.calls == (closed if order == Order.CLOSE else [])
    assert bench.said == [(Answer.WORKERS_CLOSED,)]
    assert bench.calls == closed


async def test_a_rank_is_watched_until_it_has_joined_and_starts_something(bench: Bench) -> None:
    async with bench.running():
        (watch,) = bench.watches
        assert (watch["rank"], watch["deadline"], watch["speaks"]) == (os.getppid(), 9.0, True)
        told = [(watch["over"](), watch["started"]())]
        for order in ((Order.JOINED, None), (Order.START_SCHEDULER, SCHEDULER)):
            write_frame(bench.control, order)
            await asyncio.sleep(0.02)
            told.append((watch["over"](), watch["started"]()))
        assert told == [(False, False), (True, False), (True, True)]
    async with bench.running():
        pass
    assert bench.watches[1]["over"]()  # it ends with the agent


async def test_nothing_is_told_of_ends_while_it_closes(bench: Bench) -> None:
    async with bench.running((Order.JOINED, None)) as agent:
        agent._stop.set()
        agent._scheduler.on_end(7)
        agent._workers.on_end("a", "why")
    assert bench.said == [(Answer.WORKERS_CLOSED,)]


async def test_orders_come_in_frames(bench: Bench) -> None:
    async with bench.running((Order.JOINED, None)):
        for order, payload in (
            (Order.DASHBOARD, None),
            (Order.SCHEDULER_FILE, ("/f", "id")),
            (Order.CLOSE_WORKERS, None),
        ):
            write_frame(bench.control, (order, payload))
    assert bench.said == [(Answer.WORKERS_CLOSED,)] * 2
    assert bench.calls == [
        ("send", Order.DASHBOARD), ("close workers",), ("remove", "/f", "id"), ("close workers",), ("close scheduler", 2.0)
    ]  # fmt: skip


async def test_an_order_that_can_not_be_read(bench: Bench) -> None:
    async with bench.running((Order.JOINED, None)):
        data = pickle.dumps(1).replace(b"K\x01.", b"cgone\nX\n.")
        os.write(bench.control, struct.pack("<Q", len(data)) + data)
    told, *_ = bench.said
    assert told[0] == Answer.FAILED
    assert "the agent can't read its orders: ModuleNotFoundError" in str(told[1])


@pytest.mark.parametrize("ucx", [WorkerUcx.OFF, WorkerUcx.ALL])
async def test_workers_start_and_their_end_is_told(bench: Bench, ucx: WorkerUcx) -> None:
    order = (Order.START_WORKERS, replace(START, config={"probe": 5}, transport=Transport(ucx)))
    async with bench.running(order, log_directory="/logs") as agent:
        agent._workers.on_end("a", "why")
        agent._workers.ended.set()
    assert bench.said == [
        (Answer.READY, 1), (Answer.WORKER_ENDED, "a", "why"), (Answer.WORKERS_ENDED, True), (Answer.WORKERS_CLOSED,)
    ]  # fmt: skip
    assert bench.calls[0] == ("start workers", order[1])
    assert bench.logs == [("/logs", "rank-3-h")]
    assert dask.config.get("scheduler-address") == "tcp://h:1"
    assert dask.config.get("probe") == 5
    assert (dask.config.get(MESSAGE, None) == MESSAGE_BYTES) is (ucx is WorkerUcx.ALL)


@pytest.mark.parametrize(("plans", "log_directory"), [((), "/logs"), ((PLAN,), None)])
async def test_no_log_file_without_a_directory_or_workers(
    bench: Bench, plans: Any, log_directory: str | None
) -> None:
    """And none are lost: there are none, or they were told to close."""
    order = (Order.START_WORKERS, replace(START, workers=plans))
    async with bench.running(order, log_directory=log_directory) as agent:
        if plans:
            write_frame(bench.control, (Order.CLOSE_WORKERS, None))
        else:
            agent._workers.ended.set()
    assert bench.logs == []
    assert bench.said == [(Answer.READY, len(plans)), *[(Answer.WORKERS_CLOSED,)] * (1 + len(plans))]


async def test_workers_wait_for_ucx_and_their_delay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over UCX the agent initialises it in a thread, without a GPU, while the scheduler starts."""
    calls: list[str] = []
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(module, "hide_gpus", lambda environ: calls.append("hide"))
    monkeypatch.setattr(module, "in_thread", lambda _: ready)
    monkeypatch.setattr(module, "stop_watching_ucx", lambda: calls.append("stop watching"))
    order = (Order.START_WORKERS, replace(START, delay=0.15))
    async with bench.running(order, protocol=Protocol.UCX):
        assert bench.calls == []
        ready.set_result(None)
        await asyncio.sleep(0.02)
        assert bench.calls == []
        await asyncio.sleep(0.2)
        assert bench.calls[0][0] == "start workers"
    assert calls == ["hide", "stop watching"]


async def test_a_rank_that_is_gone_ends_it_though_others_hold_the_pipe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARENT_INTERVAL", 0.01)
    async with bench.running((Order.JOINED, None)) as agent:
        await asyncio.sleep(0.05)
        assert not agent._stop.is_set()
        monkeypatch.setattr(module.os, "getppid", lambda: 1 << 30)
        await asyncio.sleep(0.05)
        assert agent._stop.is_set()


async def test_a_rank_that_reads_no_answers_is_gone(bench: Bench) -> None:
    os.close(bench.answers.fd)
    bench.answers = FrameReader(os.open(os.devnull, os.O_RDONLY))
    async with bench.running((Order.JOINED, None)) as agent:
        agent.answer(Answer.PREPARED, "/scratch")
        assert agent._stop.is_set()
