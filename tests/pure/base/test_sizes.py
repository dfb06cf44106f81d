"""Bytes as people write and read them."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.base.text import format_bytes, parse_bytes, parse_memory_limit
from dask_gpu_mpi.errors import OptionError
from support.mocks.inputs import GIB


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


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1023, "1023 B"), (1024, "1.00 KiB"), (1024**2 - 1, "1024.00 KiB"), (1024**2, "1.00 MiB"),
        (1024**3 - 1, "1024.00 MiB"), (1024**3, "1.00 GiB"), (1024**4 - 1, "1024.00 GiB"), (1024**4, "1.00 TiB"),
    ],
)  # fmt: skip
def test_the_unit_is_the_largest_that_fits(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("limit", "meaning"),
    [
        (None, 0), (0, 0), ("0", 0), (0.0, 0), (1, 1.0), (1.0, 1.0), ("1", 1.0), (0.25, 0.25), ("0.25", 0.25), (1e-3, 1e-3),
        (1.5, 1), (2, 2), (2.5e9, 2500000000), ("2e9", 2000000000), ("7 B", 7), ("4GB", 4000000000), ("4 GiB", 4 * GIB),
    ],
)  # fmt: skip
def test_memory_limits(limit: int | float | str | None, meaning: int | float) -> None:
    found = parse_memory_limit(limit)
    assert (found, type(found)) == (meaning, type(meaning))


@pytest.mark.parametrize("limit", ["", "much", "-4GB", "nan", -0.5, -1, float("inf"), float("nan"), [1]])
def test_memory_limits_that_mean_nothing(limit: Any) -> None:
    with pytest.raises(OptionError, match="^memory_limit: invalid value .* \\(expected bytes"):
        parse_memory_limit(limit)
