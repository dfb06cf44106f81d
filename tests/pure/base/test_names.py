"""The order of workers' names."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.text import natural


@pytest.mark.parametrize(
    "names",
    [
        ["2-0", "2-1", "10-0", "10-cpu-0"],
        ["9", "9-1", "10"],
        ["a", "a2", "a10", "b1"],
        ["", "1", "²"],
    ],
)
def test_numbers_in_names_count_as_numbers(names: list[str]) -> None:
    assert sorted({*names}, key=natural) == names
