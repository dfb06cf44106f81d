"""The record of a scheduler, by its plugin's calls."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.plain_data import pack, unpack
from dask_gpu_mpi.view import recorder as module
from dask_gpu_mpi.view.heartbeat import ACTIONS, Series
from dask_gpu_mpi.view.task_record import (
    MOST_GAPS,
    MOST_LANES,
    MOST_OF_TASK,
    MOST_TASK_NAMES,
    Occupation,
    TaskStream,
    Transfers,
)
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
    times = array("d", record["series"]["times"])
    assert 360 <= len(times) < 720
    assert times[-1] - times[0] > 1_150


def only_worker(job: Any) -> dict[str, Any]:
    (worker,) = job.recorder.record()["workers"]
    return dict(worker)


def test_peaks_are_of_every_sample() -> None:
    job = made_up(1, 1, 2_000, 0)
    kept = max(array("f", job.recorder.record()["series"]["values"]["0-0"]["gpu_memory"]))
    state = next(iter(job.workers.values()))
    state.metrics = {**state.metrics, "gpu_memory_used": 79 * 2**30}
    job.now += 0.5
    job.recorder.sample()
    assert only_worker(job)["peaks"]["gpu_memory"] == 79 * 2**30 > kept
    # a sum of reasons has no peak
    state.metrics = {"gpu_mpi": {"gpus": [[None] * 3 + [0.5, 50, 1], [None] * 4 + [60, 4]]}}
    job.recorder.sample(last=True)
    peaks, series = only_worker(job)["peaks"], job.recorder.record()["series"]["values"]["0-0"]
    assert {"gpu_slowed", "gpu_slowed_1"} <= series.keys()
    assert [quantity for quantity in peaks if "slowed" in quantity] == []
    assert (peaks["gpu_power"], peaks["gpu_temperature_1"]) == (0.5, 60)


def test_running_tasks_have_computed_until_now_and_a_worker_that_comes_again_is_counted() -> None:
    job = made_up(1, 1, 1, 0)
    state = next(iter(job.workers.values()))
    state.processing, state.executing = {"a": 1}, {"a": 2.0, "ended": 50.0}
    state.last_seen = job.now - 1.0
    job.recorder.sample()
    assert job.recorder._occupations["0-0"].running == 3.0
    assert only_worker(job)["starts"] == 1
    for starts in (2, 3):
        job.kill("0-0")
        assert only_worker(job)["starts"] == starts


def test_energy_is_counted_from_the_first_reading_of_each_gpu() -> None:
    job = made_up(1, 1, 10, 0)
    state = next(iter(job.workers.values()))

    def reads(*joules: float | None) -> None:
        state.metrics = {"gpu_mpi": {"gpus": [[None] * 6 + [each] for each in joules]}}
        job.now += 1
        job.recorder.sample()

    for readings in ((1000.0, None), (1300.0, 50.0), (None, 60.0), (1500.5, 75.0)):
        reads(*readings)
    data = job.report()
    assert data["record"]["workers"][0]["energy"] == [500.5, 25.0]
    assert data["summary"]["energy"] == 525.5
    reads(2.0, 75.0)  # the driver was loaded again
    assert only_worker(job)["energy"] == [0.0, 25.0]


def test_a_transition_that_is_not_of_a_finished_task_is_not_counted() -> None:
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
    # data of a sender that nobody knows
    startstops = [{"action": "transfer", "start": 1.0, "stop": 2.0, "source": "tcp://gone:1"}]
    job.recorder.transition("key", "processing", "memory", worker=address, startstops=startstops)
    assert job.recorder.record()["transfers"]["rows"] == [
        {"from": "tcp://gone:1", "to": "0-0", "count": 1, "bytes": 0, "seconds": 1.0}
    ]


def test_tasks_that_run_when_the_record_begins_make_it_busy() -> None:
    job = made_up(1, 1, 1, 0)
    job.tasks = {"key": SimpleNamespace(state="processing")}
    recorder = module.Recorder(job, from_start=False, clock=lambda: job.now)
    job.now += 2.0
    recorder.transition("key", "processing", "memory")
    job.now += 1.0
    recorder.transition("other", "released", "waiting")
    job.now += 4.0
    assert recorder.record()["busy"]["seconds"] == 6.0


async def test_a_worker_that_reports_nonsense_does_not_end_the_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    job = made_up(1, 1, 1, 0)
    state = next(iter(job.workers.values()))
    state.metrics = None
    job.recorder.begin()
    await asyncio.sleep(0.05)
    state.metrics = {"cpu": 3.0}
    job.now += 10.0
    await asyncio.sleep(0.1)
    columns = job.recorder.record()["series"]["values"]["0-0"]
    assert 3.0 in array("f", columns["cpu"])


# -- measurements, and data between workers, stay within their bounds


def test_figures_that_come_late_go_or_come_again_have_gaps() -> None:
    series = Series(1.0, most_names=2)
    for second, names in enumerate(("a", "abc", "bd", "abc")):
        series.add(second, {name: {"cpu": 1.0} for name in names})
    series.add(4, {"a": {"cpu": 1.0, "gpu": 2.0}})
    packed = series.packed()
    columns = {
        (name, quantity): [math.isnan(value) for value in array("f", column)]
        for name, columns in packed["values"].items()
        for quantity, column in columns.items()
    }
    assert columns == {
        ("a", "cpu"): [False, False, True, False, False],
        ("b", "cpu"): [True, False, False, False, True],
        ("a", "gpu"): [True, True, True, True, False],
    }
    assert packed["left_out"] == 2
    assert list(array("d", packed["times"])) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("most", "senders"), [(50, "h0 h1 h2 h3"), (3, "h0 h1 h2 other")])
def test_too_many_pairs_become_those_of_nodes_and_nothing_is_lost(most: int, senders: str) -> None:
    transfers = Transfers(most=most)
    for number in range(1_000):
        sender, receiver = number % 32, number * 7 % 31
        transfers.add((f"{sender}", f"h{sender // 8}"), (f"{receiver}", f"h{receiver // 8}"), 10, 0.5)
    rows = transfers.as_rows()
    assert transfers.by == "node"
    assert {row["from"] for row in rows} <= set(senders.split())
    sums = {key: sum(row[key] for row in rows) for key in ("count", "bytes", "seconds")}
    assert sums == {"count": 1_000, "bytes": 10_000, "seconds": 500.0}
    assert len(rows) <= max(16, most + 2)


# -- the sample of tasks: bounded, spread over the job, with the longest


def did(action: str, start: float, stop: float) -> dict[str, Any]:
    return {"action": action, "start": start, "stop": stop}


def compute(start: float, length: float = 1.0) -> list[dict[str, Any]]:
    return [did("compute", start, start + length)]


def test_all_of_few_tasks() -> None:
    stream = TaskStream()
    stream.add("0", 11, "f", [did("transfer", 9.0, 10.0), *compute(10.0)], failed=False)
    stream.add("0", 12, "g", compute(11.0, 0.5), failed=True)
    stream.restarted("0")  # its threads take the lanes of those before
    stream.add("0", 99, "g", compute(12.0, 0.5), failed=True)
    packed = stream.packed(9.0)
    assert (packed["seen"], packed["shown"], packed["stride"]) == (3, 3, 1)
    assert packed["names"] == ["f", "g"]
    assert packed["lanes"] == [["0", 0], ["0", 1]]
    assert list(array("d", packed["start"])) == [0.0, 1.0, 2.0, 3.0]
    assert list(array("f", packed["length"])) == [1.0, 1.0, 0.5, 0.5]
    actions = [ACTIONS[action] for action in array("b", packed["action"])]
    assert actions == ["transfer", "compute", "failed", "failed"]
    assert list(array("i", packed["lane"])) == [0, 0, 1, 0]


def test_many_tasks_are_sampled_over_all_of_the_job_and_the_longest_are_kept() -> None:
    stream = TaskStream(most=1_000, longest=5)
    for number in range(20_000):
        length = 50.0 if number % 4_000 == 7 else 0.1
        stream.add("0", 1, f"task{number % 4}", compute(number, length), failed=False)
    packed = stream.packed(0.0)
    starts, lengths = array("d", packed["start"]), array("f", packed["length"])
    assert packed["seen"] == 20_000
    assert 1_000 <= packed["shown"] <= 1_005
    assert packed["stride"] == 20
    for spread, parts in (
        (Counter(start // 6_667 for start in starts), 3),
        (Counter(array("i", packed["name"])), 4),
    ):
        assert len(spread) == parts
        assert min(spread.values()) > 0.5 * max(spread.values())
    longest = [start for start, length in zip(starts, lengths, strict=True) if length > 1]
    assert longest == [7.0, 4_007.0, 8_007.0, 12_007.0, 16_007.0]


def test_names_lanes_and_rectangles_of_a_task_are_bounded() -> None:
    stream = TaskStream(most=100_000)
    for number in range(MOST_TASK_NAMES + 50):
        stream.add("0", number, f"name{number}", compute(number), failed=False)
    stream.add("1", 1, "f", compute(0.0) * 1_000, failed=False)
    stream.add("1", 1, "f", [], failed=False)
    stream.add("1", 1, "f", [did("new", 0.0, 1.0)], failed=False)
    packed = stream.packed(0.0)
    assert len(packed["names"]) == MOST_TASK_NAMES + 1
    assert packed["names"][-1] == "other"
    assert len(packed["lanes"]) == MOST_LANES + 1
    assert len(array("d", packed["start"])) == MOST_TASK_NAMES + 50 + MOST_OF_TASK + 1
    assert ACTIONS.index("other") in array("b", packed["action"])


# -- the use of a worker's time


def test_data_cost_time_in_gaps_between_tasks_even_if_they_are_reported_with_a_later_one() -> None:
    worker = Occupation()
    worker.came(0.0, threads=1)
    worker.finished(1, [did("disk-read", 2.0, 3.0), did("compute", 3.0, 4.0)])
    for _ in range(MOST_GAPS):  # between tasks that follow at once there is no gap
        worker.finished(1, [did("compute", 4.0, 4.0)])
    worker.finished(1, [did("transfer", 0.0, 2.5), did("compute", 4.0, 5.0)])
    assert (worker.computing, worker.transfer, worker.disk) == (2.0, 2.0, 1.0)
    # those that come while a task runs cost nothing
    worker.finished(1, [did("transfer", 4.0, 6.0), did("transfer", 4.0, 5.5), did("compute", 7.0, 8.0)])
    assert (worker.computing, worker.transfer) == (3.0, 3.0)


def test_gaps_are_bounded() -> None:
    worker = Occupation()
    worker.came(0.0, threads=1)
    for number in range(10 * MOST_GAPS):
        worker.finished(1, [did("compute", number + 0.5, number + 1.0)])
    worker.finished(1, [did("transfer", 0.0, 1e6), did("compute", 1e6, 1e6)])
    assert worker.transfer == pytest.approx(0.5 * (MOST_GAPS - 1) + 1e6 - 10 * MOST_GAPS)


def test_a_lost_worker_has_computed_until_then() -> None:
    worker = Occupation()
    worker.came(10.0, threads=2)
    worker.has_tasks(11.0, 1)
    worker.running = 3.0
    worker.gone(15.0)
    worker.came(20.0, threads=2)
    assert [worker.sums(25.0)[name] for name in ("present", "assigned", "computing")] == [10.0, 4.0, 3.0]
