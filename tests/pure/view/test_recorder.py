"""What is recorded of a scheduler, by its plugin's calls; and of a real one, through its handler."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.plain_data import pack, unpack
from dask_gpu_mpi.view import recorder as module
from dask_gpu_mpi.view.recorder import Recorder, recorder_of
from support.mocks.snapshots import made_up


@pytest.mark.slow
def test_the_record_is_plain_data_of_bounded_size() -> None:
    job = made_up(16, 4, 1_200, 50)
    record = job.recorder.record()
    packed = pack(record)
    assert unpack(packed)["tasks"]["seen"] == 60_000
    # more than this Dask would read in a thread, which there is none of at the end of an interpreter
    assert len(packed) < 8 << 20
    assert record["tasks"]["shown"] <= 21_000
    assert len(array("d", record["series"]["times"])) < 720
    assert {
        len(array("f", column))
        for columns in record["series"]["values"].values()
        for column in columns.values()
    } == {len(array("d", record["series"]["times"]))}


def test_peaks_are_of_every_sample() -> None:
    job = made_up(1, 1, 2_000, 0)
    kept = max(array("f", job.recorder.record()["series"]["values"]["0-0"]["gpu_memory"]))
    state = next(iter(job.workers.values()))
    state.metrics = {**state.metrics, "gpu_memory_used": 79 * 2**30}
    job.now += 0.5
    job.recorder.sample()
    assert job.recorder.record()["peaks"]["0-0"]["gpu_memory"] == 79 * 2**30 > kept


def test_deaths_and_restarts() -> None:
    job = made_up(2, 2, 10, 1)
    job.kill("1-0")
    record = job.recorder.record()
    told = [(what, worker, why) for _, what, worker, why in record["events"] if worker == "1-0"][-2:]
    assert told == [("worker gone", "1-0", "handle-worker-cleanup"), ("worker restarted", "1-0", "")]
    assert record["deaths"][-1][1:3] == ["1-0", "signal 9"]
    assert next(worker for worker in record["workers"] if worker["name"] == "1-0")["starts"] >= 2
    assert len(record["alive"]) == 4


def test_what_is_no_finished_task_is_not_counted() -> None:
    job = made_up(1, 1, 1, 0)
    (address,) = job.workers
    startstops = [{"action": "compute", "start": 1.0, "stop": 2.0}]
    for start, finish, more in (
        ("waiting", "processing", {}),
        ("processing", "released", {}),
        ("processing", "memory", {"worker": address}),  # without times
        ("processing", "memory", {"worker": "tcp://gone:1", "startstops": startstops}),
        ("processing", "erred", {}),  # its worker has died
    ):
        job.recorder.transition("key", start, finish, **more)
    tasks = job.recorder.record()["tasks"]
    assert (tasks["seen"], tasks["failed"]) == (0, 1)


def test_a_sender_that_nobody_knows() -> None:
    job = made_up(1, 1, 1, 0)
    (address,) = job.workers
    startstops = [{"action": "transfer", "start": 1.0, "stop": 2.0, "source": "tcp://gone:1"}]
    job.recorder.transition("key", "processing", "memory", worker=address, startstops=startstops)
    assert job.recorder.record()["transfers"]["rows"] == [["tcp://gone:1", "0-0", 1, 0, 1.0]]


@pytest.mark.parametrize("from_start", [True, False])
def test_of_a_real_scheduler(from_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Client, Scheduler, Worker

    monkeypatch.setattr(module, "INTERVAL", 0.05)

    async def run() -> tuple[Recorder, Recorder, dict[str, Any]]:
        options: dict[str, Any] = {"dashboard": False, "dashboard_address": ":0", "host": "127.0.0.1"}
        async with Scheduler(**options) as scheduler:
            first = recorder_of(scheduler, from_start=True) if from_start else None
            async with (
                Worker(scheduler.address, name="w", nthreads=1),
                Client(scheduler.address, asynchronous=True) as client,
            ):
                assert await client.gather(client.map(abs, range(10), pure=False)) == list(range(10))
                known = recorder_of(scheduler)
                await asyncio.sleep(0.2)
                record = recorder_of(scheduler).record()
            known.end()
        return first or known, known, record

    first, known, record = asyncio.run(run())
    assert first is known
    assert record["from_start"] is from_start
    assert record["tasks"]["seen"] == (10 if from_start else 0)
    assert [(prefix["name"], prefix["tasks"]) for prefix in record["prefixes"]] == [("abs", 10)]
    assert record["alive"] == ["w"]
    assert record["peaks"]["w"]["memory"] > 0
    assert len(array("d", record["series"]["times"])) >= 2


def test_a_worker_that_reports_nonsense_does_not_end_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    job = made_up(1, 1, 1, 0)
    state = next(iter(job.workers.values()))

    async def run() -> bool:
        state.metrics = None
        job.recorder.begin()
        await asyncio.sleep(0.05)
        state.metrics = {"cpu": 3.0}
        job.now += 10.0
        await asyncio.sleep(0.1)
        job.recorder.end()
        return True

    assert asyncio.run(run())
    columns = job.recorder.record()["series"]["values"]["0-0"]
    assert 3.0 in array("f", columns["cpu"])


def test_prefixes_are_bounded() -> None:
    prefix = SimpleNamespace(
        name="f",
        duration=1.0,
        state_counts={"memory": 1, "erred": 0},
        all_durations={"compute": 1.0},
        max_exec_time=-1,
    )
    assert len(module._prefixes({str(number): prefix for number in range(2_000)}, {})) == module.MOST_SHOWN
