"""The sample of tasks: bounded, spread over the job, with the longest."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from dask_gpu_mpi.view.heartbeat import ACTIONS
from dask_gpu_mpi.view.recorder import MOST_LANES, MOST_OF_TASK, MOST_TASK_NAMES, TaskStream


def compute(start: float, length: float = 1.0) -> list[dict[str, Any]]:
    return [{"action": "compute", "start": start, "stop": start + length}]


def test_all_of_few_tasks() -> None:
    stream = TaskStream()
    stream.add(
        "0", 11, "f", [{"action": "transfer", "start": 9.0, "stop": 10.0}, *compute(10.0)], failed=False
    )
    stream.add("0", 12, "g", compute(11.0, 0.5), failed=True)
    packed = stream.packed(9.0)
    assert (packed["seen"], packed["shown"], packed["stride"]) == (2, 2, 1)
    assert packed["names"] == ["f", "g"]
    assert packed["lanes"] == [["0", 0], ["0", 1]]
    assert list(array("d", packed["start"])) == [0.0, 1.0, 2.0]
    assert list(array("f", packed["length"])) == [1.0, 1.0, 0.5]
    assert [ACTIONS[action] for action in array("b", packed["action"])] == ["transfer", "compute", "failed"]
    assert list(array("i", packed["lane"])) == [0, 0, 1]


def test_many_tasks_are_sampled_over_all_of_the_job_and_whatever_recurs() -> None:
    stream = TaskStream(most=1_000, longest=10)
    for number in range(100_000):
        stream.add("0", 1, f"task{number % 4}", compute(number), failed=False)
    packed = stream.packed(0.0)
    starts = array("d", packed["start"])
    assert packed["seen"] == 100_000
    assert 250 < packed["shown"] <= 1_010
    assert packed["stride"] > 64
    thirds = Counter(int(start // 33_334) for start in starts)
    assert len(thirds) == 3
    assert min(thirds.values()) > 0.6 * max(thirds.values())
    kinds = Counter(array("i", packed["name"]))
    assert len(kinds) == 4
    assert min(kinds.values()) > 0.5 * max(kinds.values())


def test_the_longest_are_kept() -> None:
    stream = TaskStream(most=100, longest=5)
    for number in range(10_000):
        stream.add("0", 1, "f", compute(number, 50.0 if number % 2_000 == 7 else 0.1), failed=False)
    packed = stream.packed(0.0)
    long = [
        start
        for start, length in zip(array("d", packed["start"]), array("f", packed["length"]), strict=True)
        if length > 1
    ]
    assert long == [7.0, 2_007.0, 4_007.0, 6_007.0, 8_007.0]


def test_a_restarted_worker_keeps_its_lanes() -> None:
    stream = TaskStream()
    stream.add("0", 11, "f", compute(0.0), failed=False)
    stream.restarted("0")
    stream.add("0", 99, "f", compute(5.0), failed=False)
    assert stream.packed(0.0)["lanes"] == [["0", 0]]


def test_names_lanes_and_rectangles_of_a_task_are_bounded() -> None:
    stream = TaskStream(most=100_000)
    for number in range(MOST_TASK_NAMES + 50):
        stream.add("0", number, f"name{number}", compute(number), failed=False)
    stream.add("1", 1, "f", compute(0.0) * 1_000, failed=False)
    stream.add("1", 1, "f", [], failed=False)
    stream.add("1", 1, "f", [{"action": "new", "start": 0.0, "stop": 1.0}], failed=False)
    packed = stream.packed(0.0)
    assert len(packed["names"]) == MOST_TASK_NAMES + 1
    assert packed["names"][-1] == "other"
    assert len(packed["lanes"]) == MOST_LANES + 1
    assert len(array("d", packed["start"])) == MOST_TASK_NAMES + 50 + MOST_OF_TASK + 1
    assert ACTIONS.index("other") in array("b", packed["action"])
