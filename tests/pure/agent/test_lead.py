"""How rank 0's agent leads a job, from the first registration to the mark of its end; the other agent is over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent import lead as module
from dask_gpu_mpi.agent.hub import Connection, connect, encode
from dask_gpu_mpi.agent.lead import NAMED, Leader, Progress
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.startup.meeting import listen
from dask_gpu_mpi.startup.messages import Configuration, Entry, Kind, Registration
from support.mocks.inputs import rank as rank_inventory

CONFIG = make_credentials()
ADDRESS = ("tls://127.0.0.1:5", None)
FAILURE = Failure(Problem("no disk"), 2)


@pytest.fixture(autouse=True)
def _jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The jobs leave their mark, as `launch` requires if the launcher may lose nodes; ranks fail at the same time."""
    monkeypatch.setenv("DGM_RUN", "")
    monkeypatch.setattr("dask_gpu_mpi.startup.coordinator.GATHER_FAILURES", 0.1)
    yield
    gc.enable()


class Job:
    """The agents of both ranks of a job, or of one, and what the leader says of its end."""

    def __init__(
        self, leader: Leader, local: asyncio.Queue[Any], over: asyncio.Queue[int], size: int
    ) -> None:
        self.leader, self.local, self.over, self.size = leader, local, over, size
        self.hub = ("", 0)
        self.one: Any = None

    async def enter(self, *, again: bool = False) -> Connection:
        """Rank 1 has an agent, or another one."""
        self.one = await connect(self.hub, CONFIG, 10.0)
        self.tell(1, Kind.ENTERED, (1, again))
        made: Connection = self.one
        return made

    def tell(self, rank: int, kind: Kind, payload: Any = None) -> None:
        if rank == 0:
            self.leader.send(kind, payload)
        else:
            self.one.send(encode(kind, payload))

    async def hear(self, rank: int = 0) -> tuple[str, Any]:
        """The next message to a rank's agent."""
        message = self.local.get() if rank == 0 else self.one.receive()
        return await asyncio.wait_for(message, 10)

    async def heard(self, rank: int = 0) -> str:
        return (await self.hear(rank))[0]

    def register(self, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            lo = Interface("lo", "127.0.0.1", "127.0.0.0/8")
            inventory = rank_inventory(rank, self.size, host="a")
            self.tell(rank, Kind.REGISTRATION, Registration("a", inventory, (lo,), None, ()))

    async def start(self) -> list[Any]:
        """The cluster is up: the starts of all ranks."""
        self.register()
        assert await self.heard() == Kind.SCHEDULER
        self.tell(0, Kind.ADDRESS, ADDRESS)
        starts = []
        for rank in range(self.size):
            kind, start = await self.hear(rank)
            assert kind == Kind.START
            starts.append(start)
            self.tell(rank, Kind.READY, ([], ""))
        for rank in range(self.size):
            kind, cluster = await self.hear(rank)
            assert (kind, cluster.address, cluster.plan is None) == (Kind.UP, ADDRESS[0], rank > 0)
        return starts

    async def end(self, code: int | None = 0, *ranks: int) -> int:
        """The script has ended, and these ranks close: the code that the job must have."""
        self.tell(0, Kind.OVER, (True, None, code))
        for rank in ranks:
            while await self.heard(rank) != Kind.END:
                pass
            self.tell(rank, Kind.CLOSED)
        return await asyncio.wait_for(self.over.get(), 10)


@contextlib.asynccontextmanager
async def job(
    size: int = 2, *, seconds: float = 30.0, plan_only: bool = False, **options: Any
) -> AsyncIterator[Job]:
    local: asyncio.Queue[Any] = asyncio.Queue()
    over: asyncio.Queue[int] = asyncio.Queue()
    now = time.monotonic()
    configuration = Configuration(
        Options(**options), plan_only=plan_only, started=now, deadline=now + seconds
    )
    sock = listen("127.0.0.1") if size > 1 else None
    entry = Entry(0, size, ("", 0), CONFIG, {rank: f"h{rank}" for rank in range(size)})
    leader = Leader(
        configuration,
        entry,
        Timeline("agent"),
        lambda *message: local.put_nowait(message),
        over.put_nowait,
    )
    made = Job(leader, local, over, size)
    if sock is not None:
        made.hub = sock.getsockname()[:2]
    await leader.listen(sock)
    try:
        if size > 1:
            await made.enter()
        yield made
    finally:
        await leader.close()
        if made.one is not None:
            made.one.close()


# -- the start


@pytest.mark.parametrize(("size", "is_read"), [(1, True), (2, True), (1, False)])
async def test_a_job_from_its_start_to_its_end(
    size: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile nothing is collected; the mark of a job before it goes, and its own comes at the end, if `launch` reads it."""
    mark = tmp_path / "ended"
    if is_read:
        mark.write_text("of a job before")
    else:
        monkeypatch.delenv("DGM_RUN")
    async with job(size, log_directory=tmp_path) as made:
        assert not mark.exists()
        assert not gc.isenabled()
        await made.start()
        assert gc.isenabled()
        assert await made.end(75, *range(size)) == 0
        assert await made.heard() == Kind.RELEASE
        assert (mark.exists() and mark.read_text() == "") is is_read


@pytest.mark.parametrize("protocol", Protocol)
async def test_only_a_scheduler_with_tls_needs_credentials(protocol: Protocol) -> None:
    async with job(1, protocol=protocol) as made:
        made.register()
        kind, settings = await made.hear()
        assert kind == Kind.SCHEDULER
        assert ("distributed.comm.tls.ca-file" in settings.config) is (protocol is Protocol.TLS)


@pytest.mark.parametrize("plan_only", [False, True])
async def test_a_job_that_attaches_reaches_the_running_scheduler(
    plan_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it only plans, which needs none."""
    monkeypatch.setattr(module, "read_target", lambda options: Target("tcp://10.0.0.9:5"))
    async with job(1, scheduler=False, plan_only=plan_only) as made:
        made.register()
        kind, order = await made.hear()
        assert kind == (Kind.DONE if plan_only else Kind.START)
        assert plan_only or (order.address, order.scheduler) == ("tcp://10.0.0.9:5", "of another job")


async def test_a_plan_is_the_end_of_its_command(tmp_path: Path) -> None:
    """Which marks nothing."""
    (tmp_path / "ended").touch()
    async with job(plan_only=True, log_directory=tmp_path) as made:
        made.register()
        kind, plan = await made.hear()
        assert (kind, isinstance(plan, Plan)) == (Kind.DONE, True)
        assert await made.hear(1) == (Kind.DONE, 0)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("connected", [True, False])
async def test_rank_0_prints_the_report_of_failures_before_others_hear_of_it(connected: bool) -> None:
    """A launcher ends all ranks when one fails. The failure of a rank whose agent is not connected comes by its rank."""
    async with job() as made:
        made.tell(0, Kind.FAILED, FAILURE)
        if connected:
            made.tell(1, Kind.FAILED, FAILURE)
        else:
            made.leader.fail(1, FAILURE)
        report = (FAILURE, False)
        assert await made.hear() == (Kind.FAIL, report)
        waiting = asyncio.ensure_future(made.one.receive())
        assert (await asyncio.wait([waiting], timeout=0.1))[0] == set()
        spread = asyncio.ensure_future(made.leader.spread(*report))
        assert await waiting == (Kind.FAIL, report)
        made.leader.fail(1, Failure(Problem("another, later")))
        await asyncio.sleep(0)
        assert made.local.empty()
        made.one.close()
        assert await spread  # the agents of all other ranks have ended


@pytest.mark.parametrize("connected", [True, False])
async def test_a_rank_that_does_not_end_after_the_report(
    connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent hangs, or has never come."""
    monkeypatch.setattr(module, "UNHEARD", 0.1)
    async with job() as made:
        if not connected:
            made.one.close()
            assert await made.heard() == Kind.FAIL
        assert not await made.leader.spread(FAILURE, True)


async def test_an_agent_that_connects_after_the_report_gets_it_as_well() -> None:
    async with job(3) as made:
        made.tell(1, Kind.FAILED, FAILURE)
        assert await made.heard() == Kind.FAIL
        spread = asyncio.ensure_future(made.leader.spread(FAILURE, False))
        first = made.one
        assert await made.hear(1) == (Kind.FAIL, (FAILURE, False))
        made.one = await connect(made.hub, CONFIG, 10.0)
        made.tell(2, Kind.ENTERED, (2, False))
        assert await made.hear(2) == (Kind.FAIL, (FAILURE, False))
        first.close()
        made.one.close()
        assert await spread


@pytest.mark.parametrize("what", ["process", "agent"])
async def test_a_rank_that_ends_while_the_cluster_starts(what: str) -> None:
    async with job() as made:
        if what == "process":
            made.tell(1, Kind.GONE)
        made.one.close()
        kind, (failure, fatal) = await made.hear()
        assert (kind, fatal) == (Kind.FAIL, False)
        text = f"rank 1 of 2 on h1: its {what} ended while the cluster started"
        assert failure.problem.text == text


async def test_a_silent_rank_is_named_with_its_step() -> None:
    async with job(seconds=0.2) as made:
        made.tell(0, Kind.STEP, "inspecting the GPUs (NVML)")
        kind, (failure, fatal) = await made.hear()
        assert (kind, fatal) == (Kind.FAIL, True)
        for step in ("waiting for its agent to import Dask", "inspecting the GPUs (NVML)"):
            assert f"no response before the start-up timeout (startup_timeout); last step: {step}" in str(
                failure.problem
            )


async def test_a_rank_that_was_left_out_and_enters_when_the_cluster_is_up() -> None:
    async with job(tolerate_lost_ranks=1, seconds=0.5) as made:
        made.one.close()  # its agent has not come yet
        made.leader._coordinator.hosts = dict.fromkeys(range(2), "a")  # where `register` has them
        made.register(0)
        assert await made.heard() == Kind.SCHEDULER
        made.tell(0, Kind.ADDRESS, ADDRESS)
        assert await made.heard() == Kind.START
        made.tell(0, Kind.READY, ([], ""))
        assert await made.heard() == Kind.UP
        await made.enter()
        assert await made.hear(1) == (Kind.DONE, 1)


# -- the running cluster


async def test_another_agent_of_a_rank_starts_what_has_not_ended() -> None:
    """And it ends if the cluster is over. The rank keeps the connection of the first until then."""
    async with job(cpu_workers=2) as made:
        _, start = await made.start()
        made.tell(1, Kind.WORKER_ENDED, (start.workers[0].name, True))
        before = [made.one]
        await made.enter(again=True)
        again = replace(start, workers=start.workers[1:], delay=0.0)
        assert await made.hear(1) == (Kind.START, again)
        made.tell(0, Kind.OVER, (False, None, 0))
        assert await made.hear(1) == (Kind.STOP, None)
        before.append(made.one)
        await made.enter(again=True)
        assert await made.hear(1) == (Kind.END, (0, None))
        for connection in before:
            with pytest.raises((EOFError, OSError)):
                await connection.receive()
            connection.close()


@pytest.mark.parametrize("ended", [True, False])
async def test_rank_0_has_ended(ended: bool) -> None:
    """The job is over, if it is not already."""
    async with job() as made:
        await made.start()
        if ended:
            made.tell(0, Kind.OVER, (True, None, 75))
            assert await made.hear(1) == (Kind.END, (75, None))
        made.leader.end()
        if not ended:
            assert await made.hear(1) == (Kind.END, (0, None))
    with pytest.raises((EOFError, OSError)):
        await made.hear(1)


@pytest.mark.parametrize(
    ("tolerated", "closes", "code", "mark"),
    [
        (0, False, 3, "gone"),  # a process was killed, and no node is lost: the launcher's code counts
        (1, False, 3, "3\n"),
        (1, False, 0, "0\n"),
        (1, False, None, ""),  # not known: the launcher's counts
        (0, True, 3, ""),
    ],
)
async def test_the_mark_has_the_code_of_the_script_if_ranks_are_lost(
    tolerated: int, closes: bool, code: int | None, mark: str, tmp_path: Path
) -> None:
    """The launcher's own may be another."""
    async with job(tolerate_lost_ranks=tolerated, log_directory=tmp_path) as made:
        await made.start()
        if not closes:
            made.tell(1, Kind.GONE)
            kind = await made.heard()  # of the loss, before the end
            assert kind == (Kind.LOST if tolerated else Kind.STOP)
        assert await made.end(code, *range(1 + closes)) == 0
        file = tmp_path / "ended"
        assert file.read_text() == mark


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.ECONNRESET])
async def test_the_mark_if_a_node_is_silent(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher would wait for it."""
    async with job(log_directory=tmp_path) as made:
        await made.start()
        receive = Connection.receive

        async def silent(self: Connection) -> Any:
            await receive(self)
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(Connection, "receive", silent)
        made.tell(1, Kind.STEP, "a message")  # after which the connection has ended
        made.tell(1, Kind.STEP, "another message")
        assert await made.heard() == Kind.STOP
        assert await made.end(1, 0) == 0
        file = tmp_path / "ended"
        assert (file.read_text() if file.exists() else None) == (
            "1 lost\n" if error == errno.ETIMEDOUT else None
        )


async def test_a_rank_that_does_not_close_is_given_up_and_no_mark_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_RUNNING", 60.0)  # looks at the clock more often at the end
    monkeypatch.setattr(module, "closing_time", lambda options, environ: -1.0)
    monkeypatch.setattr(module, "closing_slack", lambda _: 0.2)
    async with job(log_directory=tmp_path) as made:
        await made.start()
        began = time.monotonic()
        assert await made.end(75, 0) == 75
        assert time.monotonic() - began > 0.19
        assert not (tmp_path / "ended").exists()


# -- what a user sees of it


def shown(*at: float, terminal: bool = False, planned: int | None = 64, hosts: Any = ("h17", "h18")) -> str:
    """The output by these times of a start, in which as many workers are ready as seconds have passed."""
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    progress = Progress(100.0, out)
    for now in at:
        progress.show(100.0 + now, lambda now=now: (int(now), planned, hosts))  # type: ignore[misc]
    for _ in range(2):
        progress.clear()
    return out.getvalue()


def test_a_line_every_ten_seconds_in_a_file() -> None:
    lines = shown(*(tenth / 10 for tenth in range(350))).splitlines()
    assert lines == [f"dask_gpu_mpi: {n} of 64 workers, waiting for h[17-18]" for n in (10, 20, 30)]


def test_one_line_that_changes_on_a_terminal() -> None:
    lines = [f"\r\x1b[Kdask_gpu_mpi: {n} of 64 workers, waiting for h[17-18]" for n in (0, 2)]
    assert shown(0.4, 0.5, 0.9, 2.0, terminal=True) == "".join([*lines, "\r\x1b[K"])
    assert shown(0.4, terminal=True) == ""


def test_what_is_awaited() -> None:
    assert shown(10.0, planned=None, hosts=[]) == "dask_gpu_mpi: starting, waiting for the scheduler\n"
    many = shown(10.0, hosts=[f"n{i}x{i % 7}" for i in range(99)])
    assert " and others" in many
    assert many.count(",") == NAMED
    assert " and others" not in shown(10.0, hosts=[f"n{i}x" for i in range(NAMED)])
