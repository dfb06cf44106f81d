"""The connection to a scheduler: one of distributed's own, and one that is watched."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, Worker

from dask_gpu_mpi.errors import ClusterLostError, InputError, Problem
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.view.job_watch import FACTS_OPERATION, JobWatch
from dask_gpu_mpi.view.snapshot import Link, NoAnswerError
from support.mocks.inputs import plan_of, worker_plan

PLAN = plan_of(worker_plan("a", "GPU-0", host="n1", gpu_index=0), warnings=(Problem("slow network"),))


@contextlib.asynccontextmanager
async def linked(watch: JobWatch | None = None) -> AsyncIterator[tuple[Any, Link]]:
    scheduler: Any = Scheduler(dashboard=False, dashboard_address="127.0.0.1:0", port=0, host="127.0.0.1")
    if watch is not None:
        watch.attach(scheduler)
    async with scheduler:
        with contextlib.closing(Link(Target(scheduler.address))) as link:
            yield scheduler, link


async def test_a_job_of_ours() -> None:
    async with linked(JobWatch(PLAN)) as (scheduler, link):
        asked: list[Any] = []
        answer = scheduler.handlers[FACTS_OPERATION]

        async def noted(**given: Any) -> Any:
            asked.append(given)
            return await answer(**given)

        scheduler.handlers[FACTS_OPERATION] = noted
        async with Worker(scheduler.address, name="a", dashboard_address="127.0.0.1:0"):
            for _ in range(2):
                snapshot = await link.sample()
                (row,) = snapshot.rows
                assert (row.node, row.gpu_index, row.device, row.worker) == ("n1", 0, "GPU-0", "a")
                assert snapshot.notes == ("slow network",)
            assert asked == [{}, {"plan": False}]  # the plan is sent once
            # nobody has come as a client: its own is for what is fired and forgotten
            assert len(scheduler.clients) == 1


async def test_a_cluster_of_others_is_asked_once_for_what_it_does_not_know() -> None:
    lines: list[str] = []

    async with linked() as (scheduler, link):
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("distributed.core").addHandler(handler)
        try:
            for _ in range(3):
                assert (await link.sample()).scheduler == scheduler.address
        finally:
            logging.getLogger("distributed.core").removeHandler(handler)
    assert lines == ["No handler gpu_mpi_job found in Scheduler"]


@pytest.mark.parametrize("listens", [False, True])
async def test_a_scheduler_that_is_not_there_or_does_not_answer(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 0.5)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1] if listens else 1
    link = Link(Target(f"tcp://127.0.0.1:{port}"))
    with pytest.raises(ClusterLostError, match=f"tcp://127.0.0.1:{port} can't be reached"):
        await link.sample()
    link.close()
    server.close()


async def test_a_scheduler_that_is_busy_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (scheduler, link):
        await link.sample()
        identity = scheduler.handlers["identity"]
        freed = asyncio.Event()

        async def busy(**kwargs: Any) -> Any:
            await freed.wait()
            return identity(**kwargs)

        scheduler.handlers["identity"] = busy
        monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 0.2)
        with pytest.raises(NoAnswerError, match=r"no response from the scheduler at .* within 0\.2 s"):
            await link.sample()
        monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 30.0)
        freed.set()
        assert (await link.sample()).scheduler == scheduler.address


async def test_the_causes_of_a_lost_connection() -> None:
    """A new connection that is not accepted in time is no end of the cluster; clocks that differ are the user's to set."""
    async with linked() as (_, link):
        assert isinstance(link._lost(OSError("certificate is not yet valid")), InputError)
        await link.sample()
        late = OSError("Timed out trying to connect")
        late.__cause__ = TimeoutError()
        assert isinstance(link._lost(late), NoAnswerError)
        late.__cause__ = ConnectionRefusedError()
        assert not isinstance(link._lost(late), NoAnswerError)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["answer", "exception", "handshake"])
async def test_nothing_that_a_stranger_sends_is_unpickled(how: str, tmp_path: Path) -> None:
    """At the address of a cluster that has ended, say, and was not encrypted."""
    from distributed.comm import listen
    from distributed.protocol import ToPickle, to_serialize

    fuse = tmp_path / "unpickled"

    async def stranger(comm: Any) -> None:
        await comm.read()
        if how == "answer":
            await comm.write({"workers": ToPickle(Bomb(fuse)), "more": to_serialize(Bomb(fuse))})
        else:
            await comm.write({"status": "uncaught-error", "exception": ToPickle(Bomb(fuse)), "text": "x"})

    extra = {"handshake_overrides": {"more": to_serialize(Bomb(fuse))}} if how == "handshake" else {}
    listener: Any = listen("tcp://127.0.0.1:0", stranger, **extra)
    async with listener:
        link = Link(Target(listener.contact_address))
        with pytest.raises((ClusterLostError, InputError)):
            await link.sample()
        link.close()
    assert not fuse.exists()
