"""What the scheduler's process notes of a run, with a scheduler of distributed's and workers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import rpc

from dask_gpu_mpi.base.plain_data import from_plain, unpack
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.view import job_watch
from dask_gpu_mpi.view.job_watch import FACTS_OPERATION, KEPT, LONGEST, JobWatch
from support.mocks.inputs import plan_of, worker_plan

PLAN = plan_of(worker_plan("a", "GPU-0", host="n1", gpu_index=0))


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[tuple[Any, JobWatch]]:
    watch = JobWatch(PLAN)
    with dask.config.set({"distributed.worker.daemon": False}):
        scheduler: Any = Scheduler(dashboard=False, dashboard_address="127.0.0.1:0", port=0, host="127.0.0.1")
        before = [*logging.getLogger("distributed").handlers]
        watch.attach(scheduler)
        async with scheduler:
            yield scheduler, watch
        assert logging.getLogger("distributed").handlers == before


def texts(watch: JobWatch) -> list[str]:
    return [text for _, text in watch.warnings]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def worker(scheduler: Any, name: str, **more: Any) -> Any:
    """A worker without a limit of memory: Dask's monitor of one would resume a worker that a test has paused."""
    return Worker(
        scheduler.address, name=name, nthreads=1, memory_limit=0, dashboard_address="127.0.0.1:0", **more
    )


async def test_a_worker_that_closes_is_no_warning_and_one_that_is_lost_is() -> None:
    async with watched() as (scheduler, watch):
        async with worker(scheduler, "a"):
            await until(lambda: len(scheduler.workers) == 1)
        await until(lambda: not scheduler.workers)
        assert texts(watch) == []
        lost = await worker(scheduler, "a")
        lost.batched_stream.comm.abort()
        await until(lambda: texts(watch))
        assert watch.recently_lost(60.0) == [("a", "gpu")]
        assert watch.recently_lost(0.0) == []
        await lost.close()
        async with worker(scheduler, "a") as one:
            await until(lambda: len(watch.warnings) == 2)
            assert watch.recently_lost(60.0) == []
            one.batched_stream.comm.abort()
            await until(lambda: watch.recently_lost(60.0))
            watch.give_up(["a"], "rank 1 on n1 lost")
            assert watch.recently_lost(60.0) == []
        gone = "worker a on n1 lost: its connection ended without a message"
        assert texts(watch) == [gone, "worker a on n1 restarted", gone, "rank 1 on n1 lost"]


async def retired(scheduler: Any) -> list[str]:
    async with rpc(scheduler.address) as remote:
        return list((await getattr(remote, FACTS_OPERATION)())["retired"])


async def test_a_worker_that_is_retired_or_closes_itself_is_not_lost() -> None:
    async with watched() as (scheduler, watch):
        one, two = await worker(scheduler, "a"), await worker(scheduler, "b")
        async with Client(scheduler.address, asynchronous=True) as client:
            await client.retire_workers([one.address])
        await one.finished()
        assert await retired(scheduler) == ["a"]
        await two.close_gracefully()
        await until(lambda: not scheduler.workers)
        assert await retired(scheduler) == ["a", "b"]
        assert watch.recently_lost(60.0) == []
        async with worker(scheduler, "a"):
            assert await retired(scheduler) == ["b"]
        assert texts(watch) == []


async def set_status(watch: JobWatch, one: Any, name: str) -> None:
    """Pause a worker, or let it run, and wait for the warning."""
    known = len(watch.warnings)
    one.status = type(one.status)[name]
    await until(lambda: len(watch.warnings) > known)


async def test_tasks_that_wait_for_workers_of_which_all_are_paused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_watch, "UNRUNNABLE_AFTER", 0.01)
    said = "warning: scheduler: all workers are paused, since too much host memory is in use, and tasks wait. Fix: "
    async with (
        watched() as (scheduler, watch),
        Client(scheduler.address, asynchronous=True) as client,
        worker(scheduler, "a") as one,
        worker(scheduler, "b") as two,
    ):
        await set_status(watch, one, "paused")
        await set_status(watch, two, "paused")
        await asyncio.sleep(0.1)
        assert said not in capfd.readouterr().err  # nothing waits
        await set_status(watch, one, "running")
        assert await client.submit(abs, -1) == 1
        watch.log_event(
            one.address, {"action": "worker-status-change", "status": "running"}
        )  # as at its start
        await set_status(watch, one, "paused")
        waiting = client.submit(abs, -2)
        await until(lambda: len(watch.warnings) == 5)
        assert capfd.readouterr().err.count(said) == 1
        one.status = type(one.status).running
        assert await waiting == 2
        assert texts(watch)[1:3] == [
            "worker b on 127.0.0.1 paused: too much host memory in use",
            "worker a on n1 continues",
        ]


async def test_tasks_that_no_worker_can_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_watch, "UNRUNNABLE_AFTER", 0.01)

    async with watched() as (scheduler, watch):

        def submit(client: Any, **asks: Any) -> Any:
            return client.submit(abs, -1, pure=False, **asks)

        async with Client(scheduler.address, asynchronous=True) as client, worker(scheduler, "b") as other:
            waiting = [submit(client, resources={"CPU": 1}), submit(client, workers="elsewhere")]
            await until(lambda: len(scheduler.unrunnable) == 2)
            watch.inspect_tasks()
            assert texts(watch) == []  # worker a of the plan has not come yet: the cluster starts
            async with worker(scheduler, "a", resources={"GPU": 1}) as one:
                await until(lambda: len(watch.warnings) == 2)
                waiting += [submit(client, resources={"CPU": 1}), submit(client, resources={"GPU": 2})]
                one.status = type(one.status).paused
                await until(lambda: scheduler.workers[one.address].status is one.status)
                waiting.append(submit(client, resources={"GPU": 1}))  # which only waits for it
                await until(lambda: len(scheduler.unrunnable) == 5 and len(watch.warnings) > 3)
                watch.inspect_tasks()
                one.status = type(one.status).running
                assert await waiting.pop() == 1
            # a worker that is lost may come back
            other.batched_stream.comm.abort()
            await until(lambda: watch.recently_lost(60.0))
            waiting.append(submit(client, resources={"GPU": 3}))
            await until(lambda: len(scheduler.unrunnable) == 5)
            watch.inspect_tasks()
            del waiting

        told = [text for text in texts(watch) if text.startswith("scheduler:")]
        assert [text.partition(" it requires ")[2] for text in told] == [
            "resources CPU=1 (expected at most GPU=1 of a worker). Fix: start CPU workers (--cpu-workers 1)",
            "workers=elsewhere (expected one of a, b). Fix: choose a worker or node of this cluster",
            "resources GPU=2 (expected at most GPU=1 of a worker). Fix: require what one worker has, or set resources in "
            "worker_options (--worker-options)",
        ]
        assert capfd.readouterr().err.splitlines() == [f"dask_gpu_mpi: warning: {text}" for text in told]


async def test_tasks_that_wait_when_all_workers_were_retired(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_watch, "UNRUNNABLE_AFTER", 0.01)
    async with watched() as (scheduler, watch), Client(scheduler.address, asynchronous=True) as client:
        async with worker(scheduler, "a"):
            await until(lambda: scheduler.workers)
            await client.retire_workers()
            await until(lambda: not scheduler.workers)
            waiting = client.submit(abs, -1)
            await until(lambda: texts(watch))
            watch.inspect_tasks()
            del waiting
        (text,) = texts(watch)
        assert text.startswith("scheduler: no worker is left, and tasks wait: all were retired")
    assert capfd.readouterr().err == f"dask_gpu_mpi: warning: {text}\n"


async def test_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(job_watch, "end_time", lambda environ: asked.append(environ) or 2e9)

    async with watched() as (scheduler, _):
        logging.getLogger("distributed.scheduler").warning("something %s", "happened")
        logging.getLogger("distributed.scheduler").info("nothing")
        async with rpc(scheduler.address) as remote:
            first = await getattr(remote, FACTS_OPERATION)()
            await getattr(remote, FACTS_OPERATION)()
        assert from_plain(Plan, unpack(first["plan"])) == PLAN
        ((moment, text),) = first["events"]
        assert text == "something happened"
        assert abs(moment - first["now"]) < 60
        assert first["end"] == 2e9
        assert len(asked) == 1  # of the batch system, once


def test_a_malformed_log_call_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Python's logging complains on standard error and returns; the scheduler must not fail by it."""
    watch = JobWatch(None)
    for argument in ("two", 2):
        watch._log.handle(logging.LogRecord("a", logging.WARNING, "", 1, "%d", (argument,), None))
    assert texts(watch) == ["2"]
    assert capsys.readouterr().err.count("--- Logging error ---") == 1


def test_the_last_warnings_are_kept_each_one_line() -> None:
    watch = JobWatch(None)
    for number in range(KEPT + 5):
        watch.warn(f"number\n{number}")
    assert texts(watch) == [f"number {number}" for number in range(5, KEPT + 5)]
    watch.warn("x" * 10_000)
    assert len(texts(watch)[-1]) == LONGEST


@pytest.mark.parametrize(("kinds", "refused"), [("gpu gpu", False), ("cpu", False), ("gpu cpu", True)])
def test_an_engine_of_all_workers_is_refused_if_some_have_no_gpu(kinds: str, refused: bool) -> None:
    """Those with a GPU would wait for the others for ever. Without any GPU the engine itself refuses."""
    workers = [worker_plan(name, {"gpu": "GPU-0"}.get(kind)) for name, kind in enumerate(kinds.split())]
    watch = JobWatch(plan_of(*workers))
    watch._names = {f"tls://{name}": name for name in watch.hosts}
    watch.refuse_cpu_workers(pickle.dumps(b"another"))
    error = pytest.raises(RuntimeError, match="1 of the 2 .*--cpu-workers")
    with error if refused else contextlib.nullcontext():
        watch.refuse_cpu_workers(pickle.dumps(b"cudf_polars.engine.dask"))


async def test_the_first_client_is_reported_once_before_or_after_somebody_asks() -> None:
    reported: list[int] = []
    async with watched() as (scheduler, watch):
        async with Client(scheduler.address, asynchronous=True):
            watch.report_client(lambda: reported.append(1))
        async with Client(scheduler.address, asynchronous=True):
            assert reported == [1]
    async with watched() as (scheduler, watch):
        watch.report_client(lambda: reported.append(2))
        for _ in range(2):
            async with Client(scheduler.address, asynchronous=True):
                assert reported == [1, 2]
