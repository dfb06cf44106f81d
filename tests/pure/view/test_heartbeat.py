"""What is read of a heartbeat, from all kinds of workers."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.view import heartbeat
from dask_gpu_mpi.view.heartbeat import measured
from dask_gpu_mpi.workers import plugins


def test_a_worker_that_spills_device_memory_and_has_two_gpus() -> None:
    told = {
        "memory": 7,
        "spilled_bytes": {"memory": 0, "disk": 0},  # of a store that distributed does not know
        "gpu_utilization": 1,
        "gpu_memory_used": 2,
        plugins.METRIC: {"spilled": 5_000, "gpus": [[10, 11, 80], [20, 21, 80]]},
    }
    assert measured(told) == {
        "memory": 7,
        "gpu_spilled": 5_000,
        "gpu": 10,
        "gpu_memory": 11,
        "gpu_1": 20,
        "gpu_memory_1": 21,
    }


@pytest.mark.parametrize(
    "told",
    [
        {"cpu": "much", "memory": True, "spilled_bytes": 7, "rmm": [], "cudf": None, "gpu": 3},
        {"cpu": float("nan"), "memory": float("inf"), "managed_bytes": 10**400},
        {heartbeat.METRIC: {"gpus": [[], ["x", None, 3, 4]], "spilled": "all"}},
        {heartbeat.METRIC: {"gpus": [7]}},
        {heartbeat.METRIC: 7},
    ],
)
def test_what_is_no_figure_is_left_out(told: dict[str, Any]) -> None:
    assert measured(told) == {}


def test_many_gpus_are_bounded() -> None:
    told = {heartbeat.METRIC: {"gpus": [[1, 2, 3]] * 1_000}}
    assert len(measured(told)) == 2 * heartbeat.MOST_GPUS
