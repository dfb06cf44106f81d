"""The summary of recorded jobs: shares of workers, and the rules that a real job on this machine can't show."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dask_gpu_mpi.view.report_summary import SHARES, printed, summarize, too_few_tasks
from support.mocks.snapshots import made_up

GIB = 2**30


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


def test_a_good_job() -> None:
    data = recorded()
    summary = summarize(data)
    assert summary["lines"]["change"] == []
    assert summary["kind"] == "gpu"
    assert summary["mean"]["computing"] == pytest.approx(54 / summary["seconds"], abs=1e-4)
    assert summary["mean"]["gpu"] == 0.9
    assert sum(part["share"] or 0.0 for part in summary["where"]) == pytest.approx(1.0, abs=0.003)
    assert summary["lines"]["where"][0].startswith("tasks: fit: 54.0 s, ")
    assert printed({"summary": summary})[-1] == "summary: change: nothing was found"


def test_waiting_for_other_workers_and_for_disks_is_waiting_for_data() -> None:
    data = recorded(computing=30.0, transfer=10.0, disk=5.0)
    seconds = data["record"]["workers"][0]["seconds"]["present"]
    assert summarize(data)["mean"]["data"] == pytest.approx(15 / seconds, abs=1e-3)


def test_the_use_of_gpus_counts_from_the_ready_cluster_on() -> None:
    data = recorded()
    times, ready = data["record"]["series"]["times"], data["job"]["ready_after"]
    times[:3] = [0.0, 0.0, 0.0]
    assert times[3] >= ready > 0
    for columns in data["record"]["series"]["workers"].values():
        columns["gpu"] = [50 if at >= ready else 0 for at in times]
    assert summarize(data)["mean"]["gpu"] == 0.5


def test_cpu_workers_do_not_dilute_the_share_of_gpus() -> None:
    data = recorded()
    data["plan"]["workers"][0]["kind"] = "cpu"
    data["record"]["workers"][0]["seconds"]["computing"] = 0.0
    summary = summarize(data)
    assert (summary["threads"], summary["worst"]) == (3, "0-1")
    assert summary["lines"]["busy"][0].startswith("mean of 3 GPU workers")


# -- what to change: each rule, by a job that shows it and by one that nearly does


def idle() -> dict[str, Any]:
    data = recorded(assigned=0.0, computing=0.0)
    data["record"]["tasks"]["seen"], data["record"]["prefixes"] = 0, []
    data["record"]["busy"] = {"first": None, "last": None, "seconds": 0.0}
    for worker in summarize(data)["workers"]:
        assert sum(worker[name] for name in SHARES) == pytest.approx(1.0, abs=0.001)
    return data


def using(**figures: float) -> dict[str, Any]:
    data = recorded()
    for worker in data["record"]["workers"]:
        measure(data, worker["name"], **figures)
    return data


def slowed(bits: int) -> dict[str, Any]:
    """The second GPU of a worker has lower clocks for a tenth of the time."""
    data = recorded()
    columns = data["record"]["series"]["workers"]["0-2"]
    known = len(columns["gpu"])
    columns["gpu_slowed_1"] = [bits if at < known // 10 else 0 for at in range(known)]
    return data


def spilling() -> dict[str, Any]:
    data = recorded(transfer=0.0, disk=5.0)
    for worker in data["record"]["workers"]:
        worker["peaks"] = {"gpu_spilled": 10 * GIB}
    return data


def last_round(seconds: float = 60.0) -> dict[str, Any]:
    data = recorded(computing=45.0, assigned=45.0)
    data["record"]["until"] = min(data["record"]["until"], data["job"]["ready_after"] + seconds)
    data["record"]["tasks"]["seen"] = 6
    data["record"]["prefixes"][0].update(tasks=6, seconds={"compute": 4 * 45.0})
    return data


def held(largest: int) -> dict[str, Any]:
    """One worker holds so much of the data."""
    data = recorded()
    for worker, size in {"0-1": largest, "0-2": GIB // 2, "0-3": GIB // 2}.items():
        measure(data, worker, managed=size)
    return data


def waiting(kind: str = "gpu", **options: int) -> dict[str, Any]:
    data = recorded(computing=25.0, assigned=25.0, transfer=30.0)
    for worker in data["plan"]["workers"]:
        worker["kind"] = kind
    data["options"] = [{"name": "worker_options", "value": options, "set": True}]
    return data


SLOWED = "heat or the hardware lowered the clocks of GPUs of 1 worker, of 0-2 for 10 %"
POOL = r"workers waited for data of others for \d\d %.* Fix: a memory pool \(worker option rmm_pool_size, docs/gpus.md\), fewer"


@pytest.mark.parametrize(
    ("made", "by", "told"),
    [
        (idle, {}, r"the workers had no task\. Fix: client = Client\(\)"),
        (using, {"gpu": 8}, "GPUs were in use for 8 % of the time, while tasks computed for 88 %. Fix: "),
        (slowed, {"bits": 1}, ""),
        (slowed, {"bits": 2}, SLOWED),
        (slowed, {"bits": 5}, SLOWED),
        (spilling, {}, r"40.00 GiB spilled from GPUs \(sum of the peaks of 4 of 4 workers\); workers waited 8 % .* Fix: smaller "
                       r"partitions, or a larger limit \(device_memory_limit\)$"),
        (last_round, {}, "6 tasks of 'fit' for 4 GPUs: 2 idle at the end; workers waited for tasks for 2"),
        (last_round, {"seconds": 3.0}, ""),  # advice for a short script makes no sense
        (held, {"largest": 6 * GIB}, r"one of 4 workers \(0-1\) held 75 % of the data: 6.00 GiB of 8.00 GiB, after "),
        (held, {"largest": 2 * GIB}, ""),
        (waiting, {}, POOL),
        (waiting, {"rmm_pool_size": GIB}, "workers waited for data of others for .* Fix: fewer shuffles"),
        (waiting, {"kind": "cpu"}, "workers waited for data of others for .* Fix: fewer shuffles"),
    ],
)  # fmt: skip
def test_what_to_change(made: Any, by: dict[str, Any], told: str) -> None:
    lines = summarize(made(**by))["lines"]["change"]
    assert [bool(re.match(told, line)) for line in lines] == [True] * bool(told)


def test_a_wait_for_the_scheduler_is_no_lack_of_tasks() -> None:
    data = last_round()
    data["summary"] = summarize(data)
    data["summary"]["mean"]["scheduler"] = data["summary"]["mean"]["tasks"]
    assert too_few_tasks(data) == []
