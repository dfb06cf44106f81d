from __future__ import annotations

import time

import pytest

from dask_gpu_mpi.base.timeline import Timeline, process_start
from support.jobs.processes import run_python


def test_laps_leave_no_gap() -> None:
    timeline = Timeline("rank")
    timeline.lap("one")
    timeline.lap("two")
    one, two = timeline.take()
    assert (one.process, one.name, two.name) == ("rank", "one", "two")
    assert one.start <= one.end == two.start <= two.end
    assert timeline.take() == []
    with pytest.raises(KeyError), timeline.step("start", "worker 0"):
        raise KeyError
    assert [step[:2] for step in timeline.take()] == [("worker 0", "start")]


def test_a_process_began_before_it_asks() -> None:
    began = process_start()
    assert began <= time.time()
    assert process_start() == pytest.approx(began, abs=0.1)
    code = "import time; time.sleep(0.6); from dask_gpu_mpi.base.timeline import process_start; print(process_start())"
    before = time.time()
    done = run_python(code)
    assert before - 0.05 < float(done.stdout) < before + 0.55
    timeline = Timeline("rank")
    timeline.lap("import")
    assert timeline.take()[0].start == pytest.approx(began, abs=0.1)
