from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dask_gpu_mpi.base.timeline import Step, Timeline, check_path, process_start, trace, write
from dask_gpu_mpi.errors import InputError
from strangers import links_are_strangers


def test_laps_leave_no_gap() -> None:
    timeline = Timeline("rank", start=time.time())
    timeline.lap("one")
    timeline.lap("two")
    one, two = timeline.take()
    assert (one.process, one.name, two.name) == ("rank", "one", "two")
    assert one.start <= one.end == two.start <= two.end
    assert timeline.take() == []


def test_a_step_of_another_process_is_kept_when_it_fails() -> None:
    timeline = Timeline("agent", start=0.0)
    with pytest.raises(KeyError), timeline.step("start", "worker 0"):
        raise KeyError
    (step,) = timeline.take()
    assert step[:2] == ("worker 0", "start")
    assert step.start <= step.end
    timeline.add([step])
    timeline.lap("rest")
    assert [(each.process, each.name) for each in timeline.take()] == [
        ("worker 0", "start"),
        ("agent", "rest"),
    ]


def test_a_process_began_before_it_asks() -> None:
    began = process_start()
    assert began <= time.time()
    assert process_start() == pytest.approx(began, abs=0.1)
    code = "import time; time.sleep(1); from dask_gpu_mpi.base.timeline import process_start; print(process_start())"
    before = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert before - 0.05 < float(done.stdout) < before + 0.9
    timeline = Timeline("rank")
    timeline.lap("import")
    assert timeline.take()[0].start == pytest.approx(began, abs=0.1)


def test_the_format() -> None:
    steps = {
        1: [Step("worker 1-0", "start", 3.0, 4.5), Step("agent", "import", 1.0, 2.0)],
        0: [Step("rank", "plan", 2.0, 2.000001)],
    }
    made = trace({0: "a"}, steps)
    events = json.loads(json.dumps(made))["traceEvents"]
    assert [event["ph"] for event in events] == ["M", "M", "X", "M", "M", "X", "M", "X"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (0, 0, "process_name"): "rank 0 on a",
        (0, 0, "thread_name"): "rank",
        (1, 0, "process_name"): "rank 1",
        (1, 1, "thread_name"): "agent",
        (1, 3, "thread_name"): "worker 1-0",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert spans[0] == {"name": "plan", "ph": "X", "ts": 2000000, "dur": 1, "pid": 0, "tid": 0}
    assert [(span["tid"], span["ts"], span["dur"]) for span in spans[1:]] == [
        (1, 1000000, 1000000),
        (3, 3000000, 1500000),
    ]


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write(str(path), {}, {0: [Step("rank", "plan", 2.0, 3.0)]})
    assert len(json.loads(path.read_text())["traceEvents"]) == 3
    assert os.listdir(tmp_path) == ["t.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write(str(tmp_path / "folder"), {}, {})
    assert sorted(os.listdir(tmp_path)) == ["folder", "t.json"]


def test_a_path_that_can_not_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    check_path(str(tmp_path / "t.json"), "a")
    with pytest.raises(InputError, match="^the timeline .* can't be written by rank 0 on a ") as caught:
        check_path(str(tmp_path / "no" / "t.json"), "a")
    assert "\n" not in str(caught.value)


def test_each_process_of_a_rank_has_its_line() -> None:
    processes = ["worker b", "scheduler", "worker a", "rank", "agent"]
    steps = [Step(name, "step", float(start), float(start)) for start, name in enumerate(processes)]
    events = trace({}, {0: steps})["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert names == {"rank": 0, "agent": 1, "scheduler": 2, "worker b": 3, "worker a": 4}


@pytest.mark.parametrize(("end", "duration"), [(2.0, 0), (1.0, 0), (2.000003, 3)])
def test_a_step_takes_no_less_than_no_time(end: float, duration: int) -> None:
    """The clock may be set back meanwhile."""
    (event,) = [e for e in trace({}, {0: [Step("rank", "x", 2.0, end)]})["traceEvents"] if e["ph"] == "X"]
    assert (event["ts"], event["dur"]) == (2000000, duration)


@pytest.mark.parametrize("strange", ["link", "pipe", "/dev/null"])
def test_neither_a_strangers_link_nor_a_device_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strange: str
) -> None:
    (tmp_path / "link").symlink_to("precious")
    os.mkfifo(tmp_path / "pipe")
    links_are_strangers(monkeypatch, tmp_path)
    path = str(tmp_path / strange)
    with pytest.raises(
        InputError, match=r"\((the symbolic link .* belongs to another user .*|no regular file)\)\. Fix: "
    ):
        check_path(path, "a")
    with pytest.raises(OSError, match=r"belongs to another|no regular file"):
        write(path, {}, {})
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_checking_leaves_nothing(tmp_path: Path) -> None:
    check_path(str(tmp_path / "t.json"), "a")
    assert os.listdir(tmp_path) == []
