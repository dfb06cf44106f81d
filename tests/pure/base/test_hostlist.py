"""Many numbers and names in few letters."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.text import counted, fold_names, fold_numbers, ranks_text


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((2, 0, 1), "0-2"), ((0, 2, 3, 9), "0,2-3,9")]
)
def test_fold_numbers(numbers: tuple[int, ...], text: str) -> None:
    assert fold_numbers(numbers) == text


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["h1"], "h1"),
        (["h1", "h2", "h3", "h7"], "h[1-3,7]"),
        (["n08", "n09", "n10"], "n[08-09],n10"),
        (["a", "b2"], "a,b2"),
        (["h1", "h1"], "h1"),
        (["node#2"], "node#2"),
    ],
)
def test_fold_names(hosts: list[str], text: str) -> None:
    assert fold_names(hosts) == text


def test_numbers_of_things() -> None:
    assert [counted(number, "rank") for number in (0, 1, 4)] == ["0 ranks", "1 rank", "4 ranks"]
    assert (ranks_text([3]), ranks_text([7, 4, 5, 6])) == ("rank 3", "ranks 4-7")


def test_the_same_number_or_name_counts_once() -> None:
    assert fold_numbers([2, 1, 2, 1]) == "1-2"
    assert ranks_text([3, 3]) == "rank 3"


def test_padded_names_fold_with_their_like() -> None:
    # else n8 and n08 could not be told apart
    assert fold_names(["n08", "n8", "n9", "n09"]) == "n[08-09],n[8-9]"
    assert fold_names(["n0", "n1"]) == "n[0-1]"
