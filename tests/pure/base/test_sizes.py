"""Bytes as people write and read them."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.sizes import format_bytes, parse_bytes, parse_memory_limit
from inventories import GIB


@pytest.mark.parametrize(
    "text", ["100", "100 MB", "100M", "5kB", "5.4 kB", "1kiB", "1e6", "1e6 kB", "MB", "5 GB", "7Ti"]
)
def test_bytes_are_read_as_dask_reads_them(text: str) -> None:
    utils = pytest.importorskip("dask.utils")
    assert parse_bytes(text) == utils.parse_bytes(text)


@pytest.mark.parametrize("text", ["", "5 foos", "1.2.3GB", "e3", "-1"])
def test_bytes_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 2048, 3 * 1024**2, GIB, 2 * 1024**4)] == [
        "0 B",
        "2.00 KiB",
        "3.00 MiB",
        "1.00 GiB",
        "2.00 TiB",
    ]
    assert parse_memory_limit("auto") is None
