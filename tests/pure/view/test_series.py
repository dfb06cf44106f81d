"""Measurements stay within their bounds, and cover the whole job."""

from __future__ import annotations

import math
from array import array

from dask_gpu_mpi.view.recorder import Series


def test_a_long_job_has_fewer_points_and_all_of_its_time() -> None:
    series = Series(1.0, most_times=100)
    for second in range(10_000):
        if series.due(second):
            series.add(second, {"0": {"cpu": second}})
    assert 50 <= len(series.times) < 100
    assert series.interval == 128.0
    assert series.times[0] == 0.0
    assert series.times[-1] > 9_800
    assert list(series.columns["0"]["cpu"]) == list(series.times)


def test_what_comes_late_goes_or_comes_again_has_gaps() -> None:
    series = Series(1.0)
    for second, names in enumerate(("a", "ab", "b", "ab")):
        series.add(second, {name: {"cpu": 1.0} for name in names})
    series.add(4, {"a": {"cpu": 1.0, "gpu": 2.0}})
    gaps = {name: [math.isnan(value) for value in columns["cpu"]] for name, columns in series.columns.items()}
    assert gaps == {"a": [False, False, True, False, False], "b": [True, False, False, False, True]}
    assert [math.isnan(value) for value in series.columns["a"]["gpu"]] == [True] * 4 + [False]


def test_workers_beyond_the_bound_are_counted() -> None:
    series = Series(1.0, most_names=2)
    for second in range(3):
        series.add(second, {str(number): {"cpu": 1.0} for number in range(5)})
    packed = series.packed()
    assert list(packed["values"]) == ["0", "1"]
    assert packed["left_out"] == 3
    assert list(array("f", packed["values"]["0"]["cpu"])) == [1.0] * 3
    assert list(array("d", packed["times"])) == [0.0, 1.0, 2.0]
