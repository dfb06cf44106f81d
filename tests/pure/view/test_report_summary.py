"""The summary of recorded jobs: shares of workers, and the rules that a real job on this machine can't show."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.view.recorder import MOST_GAPS, Occupation
from dask_gpu_mpi.view.report_summary import (
    SHARES,
    printed,
    summarize,
    too_few_tasks,
    uneven_data,
    waited_for_data,
)
from support.mocks.snapshots import made_up

GIB = 2**30


def did(action: str, start: float, stop: float) -> dict[str, Any]:
    return {"action": action, "start": start, "stop": stop}


def test_data_cost_time_in_gaps_between_tasks_also_if_they_are_noted_on_a_later_one() -> None:
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


def recorded(**changes: Any) -> dict[str, Any]:
    """A minute of four GPU workers that compute for 54 s of it, with some of its figures changed."""
    data: dict[str, Any] = made_up(1, 4, 60, 0).report()
    record = data["record"]
    data["warnings"], record["warnings"] = [], []
    seconds = record["until"] - data["job"]["ready_after"]
    record["busy"] = {"first": data["job"]["ready_after"], "last": record["until"], "seconds": seconds}
    record["tasks"] = {**record["tasks"], "seen": 240}
    counts = {"tasks": 240, "failed": 0, "bytes": 0, "longest_running": 0}
    record["prefixes"] = [{"name": "fit", "seconds": {"compute": 4 * 54.0}, **counts}]
    spent = {"present": seconds, "assigned": 55.0, "computing": 54.0, "transfer": 0.0, "disk": 0.0}
    for worker in record["workers"]:
        measure(data, worker["name"], gpu=90, managed=GIB)
        worker["peaks"] = {}
        worker["seconds"] = {**spent, **changes}
    return data


def measure(data: dict[str, Any], worker: str, **figures: float) -> None:
    """Let a worker have had these figures all the time."""
    times = data["record"]["series"]["times"]
    data["record"]["series"]["workers"][worker] |= {
        name: [value] * len(times) for name, value in figures.items()
    }


def changes(data: dict[str, Any]) -> Any:
    return summarize(data)["lines"]["change"]


def test_a_good_job() -> None:
    data = recorded()
    summary = summarize(data)
    assert summary["lines"]["change"] == []
    assert summary["kind"] == "gpu"
    assert summary["mean"]["computing"] == pytest.approx(54 / summary["seconds"], abs=1e-4)
    assert summary["mean"]["gpu"] == 0.9
    assert sum(part["share"] or 0.0 for part in summary["where"]) == pytest.approx(1.0, abs=0.003)
    assert printed({"summary": summary})[-1] == "summary: change: nothing was found"


def test_waiting_for_other_workers_and_for_disks_is_waiting_for_data() -> None:
    data = recorded(computing=30.0, transfer=10.0, disk=5.0)
    seconds = data["record"]["workers"][0]["seconds"]["present"]
    assert summarize(data)["mean"]["data"] == pytest.approx(15 / seconds, abs=1e-3)


def test_workers_without_any_task() -> None:
    data = recorded(assigned=0.0, computing=0.0)
    data["record"]["tasks"]["seen"], data["record"]["prefixes"] = 0, []
    data["record"]["busy"] = {"first": None, "last": None, "seconds": 0.0}
    for worker in summarize(data)["workers"]:
        assert sum(worker[name] for name in SHARES) == pytest.approx(1.0, abs=0.001)
    assert any(line.startswith("the workers had no task. Fix: client = Client()") for line in changes(data))


def test_gpus_that_the_tasks_do_not_use() -> None:
    data = recorded()
    for worker in data["record"]["workers"]:
        measure(data, worker["name"], gpu=8)
    (line,) = changes(data)
    assert line.startswith("GPUs were in use for 8 % of the time, while tasks computed for 88 %. Fix: ")


def test_the_use_of_gpus_counts_from_the_ready_cluster_on() -> None:
    data = recorded()
    times = data["record"]["series"]["times"]
    for worker in data["record"]["workers"]:
        columns = data["record"]["series"]["workers"][worker["name"]]
        columns["gpu"] = [50 if at >= data["job"]["ready_after"] else 0 for at in times]
    times[:3] = [0.0, 0.0, 0.0]
    assert times[3] >= data["job"]["ready_after"] > 0
    for columns in data["record"]["series"]["workers"].values():
        columns["gpu"][:3] = [0, 0, 0]
    assert summarize(data)["mean"]["gpu"] == 0.5


@pytest.mark.parametrize(("bits", "found"), [(1, False), (2, True), (5, True)])
def test_clocks_that_heat_or_hardware_has_lowered(bits: int, found: bool) -> None:
    data = recorded()
    columns = data["record"]["series"]["workers"]["0-2"]
    known = len(columns["gpu"])
    columns["gpu_slowed_1"] = [bits if at < known // 10 else 0 for at in range(known)]
    told = "heat or a fault of the hardware lowered the clocks of GPUs of 1 worker, of 0-2 for 10 %"
    assert [line[: len(told)] for line in changes(data)] == [told] * found


def test_gpus_that_spill() -> None:
    data = recorded(transfer=0.0, disk=5.0)
    for worker in data["record"]["workers"]:
        worker["peaks"] = {"gpu_spilled": 10 * GIB}
    (line,) = changes(data)
    assert line.startswith(
        "40.00 GiB spilled from GPUs (sum of the peaks of 4 of 4 workers); workers waited 8 %"
    )
    assert line.endswith("Fix: smaller partitions, or a larger limit (device_memory_limit)")


def test_a_last_round_with_idle_gpus() -> None:
    data = recorded(computing=45.0, assigned=45.0)
    data["record"]["tasks"]["seen"] = 6
    data["record"]["prefixes"][0].update(tasks=6, seconds={"compute": 4 * 45.0})
    (line,) = changes(data)
    assert line.startswith("6 tasks of 'fit' for 4 GPUs: 2 idle at the end; workers waited for tasks for 2")
    data["summary"] = summarize(data)
    mean = data["summary"]["mean"]
    mean["scheduler"] = mean["tasks"]  # it was the scheduler that they waited for
    assert too_few_tasks(data) == []


@pytest.mark.parametrize(("largest", "told"), [(6 * GIB, True), (2 * GIB, False)])
def test_one_worker_that_holds_most_of_the_data(largest: int, told: bool) -> None:
    data = recorded()
    for worker, held in {"0-1": largest, "0-2": GIB // 2, "0-3": GIB // 2}.items():
        measure(data, worker, managed=held)
    line = "one of 4 workers (0-1) held 75 % of the data: 6.00 GiB of 8.00 GiB, after "
    assert [each[: len(line)] for each in changes(data)] == [line] * told


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [("gpu", {}, True), ("gpu", {"rmm_pool_size": GIB}, False), ("cpu", {}, False)],
)
def test_gpu_workers_that_wait_for_data_are_advised_to_have_a_pool(
    kind: str, options: dict[str, int], told: bool
) -> None:
    data = recorded()
    for worker in data["record"]["workers"]:
        worker["seconds"].update(computing=20.0, transfer=30.0)
    data["plan"] = {"workers": [{**worker, "kind": kind} for worker in data["plan"]["workers"]]}
    data["options"] = [{"name": "worker_options", "value": options, "set": True}]
    data["summary"] = summarize(data)
    (line,) = waited_for_data(data)
    assert ("a memory pool (worker option rmm_pool_size, docs/gpus.md)" in line) == told
    assert "fewer shuffles" in line


def test_cpu_workers_do_not_dilute_the_share_of_gpus() -> None:
    data = recorded()
    data["plan"] = {"workers": [{**worker, "kind": "gpu"} for worker in data["plan"]["workers"]]}
    data["plan"]["workers"][0]["kind"] = "cpu"
    data["record"]["workers"][0]["seconds"]["computing"] = 0.0
    summary = summarize(data)
    assert (summary["threads"], summary["worst"]) == (3, "0-1")
    assert summary["lines"]["busy"][0].startswith("mean of 3 GPU workers")


def test_a_short_script_is_left_alone() -> None:
    data = recorded()
    data["record"]["until"] = data["job"]["ready_after"] + 3.0
    data = {**data, "summary": summarize(data)}
    assert too_few_tasks(data) == uneven_data(data) == []
