"""Durations as people read them."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.text import clock


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.9, "0:00:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_a_duration(seconds: float, text: str) -> None:
    assert clock(seconds) == text
