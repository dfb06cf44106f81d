"""Texts for people: numbers, names and sizes, folded and made harmless; and the sizes that people write."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.base.text import (
    fold_names,
    format_bytes,
    parse_bytes,
    parse_memory_limit,
    printable,
    text_of,
)
from dask_gpu_mpi.errors import OptionError
from support.mocks.inputs import GIB


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("h1 h2 h3 h7", "h[1-3,7]"),
        ("n08 n09 n10", "n[08-09],n10"),
        ("n08 n8 n9 n09", "n[08-09],n[8-9]"),  # otherwise n8 and n08 could not be told apart
        ("n0 n1", "n[0-1]"),
        ("a b2", "a,b2"),
        ("h1 h1", "h1"),
        ("node#2", "node#2"),
    ],
)
def test_fold_names(hosts: str, text: str) -> None:
    assert fold_names(hosts.split()) == text


def test_text_of_others_moves_no_cursor_and_is_xml() -> None:
    for text in ("", "h1", "Größe 5 × 3 — 世界", "<b>&'\""):
        assert printable(text) == text
    for letter in "\x1b\n\0\x9b\udcff\u202e\ufffe\u2028":
        assert printable(f"a{letter}b") == "a\ufffdb"


def test_an_exception_that_can_not_say_what_it_is() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(Broken()) == ""


@pytest.mark.parametrize(
    "text", ["0", "100", "100 MB", "100M", "5kB", "5.4 kB", "1kiB", "1e6", "1e6 kB", "MB", "5 GB", "7Ti"]
)
def test_bytes_are_read_as_dask_reads_them(text: str) -> None:
    utils = pytest.importorskip("dask.utils")
    assert parse_bytes(text) == utils.parse_bytes(text)


@pytest.mark.parametrize("text", ["", "5 foos", "1.2.3GB", "e3", "-1"])
def test_bytes_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1024**2 - 1, "1024.00 KiB"), (1024**2, "1.00 MiB"),
        (1024**3 - 1, "1024.00 MiB"), (1024**3, "1.00 GiB"), (1024**4 - 1, "1024.00 GiB"), (2 * 1024**4, "2.00 TiB"),
        (1024**4, "1.00 TiB"),
    ],
)  # fmt: skip
def test_the_unit_is_the_largest_that_fits(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("limit", "meaning"),
    [
        (None, 0), (0, 0), ("0", 0), (0.0, 0), (1, 1.0), (1.0, 1.0), ("1", 1.0), (0.25, 0.25), ("0.25", 0.25), (1e-3, 1e-3),
        (1.5, 1), (2, 2), (2.5e9, 2500000000), ("2e9", 2000000000), ("7 B", 7), ("4GB", 4000000000), ("4 GiB", 4 * GIB),
        ("auto", None),
    ],
)  # fmt: skip
def test_memory_limits(limit: int | float | str | None, meaning: int | float | None) -> None:
    found = parse_memory_limit(limit)
    assert (found, type(found)) == (meaning, type(meaning))


@pytest.mark.parametrize("limit", ["", "much", "-4GB", "nan", -0.5, -1, float("inf"), float("nan"), [1]])
def test_memory_limits_that_mean_nothing(limit: Any) -> None:
    with pytest.raises(OptionError, match="^memory_limit: invalid value .* \\(expected bytes"):
        parse_memory_limit(limit)
