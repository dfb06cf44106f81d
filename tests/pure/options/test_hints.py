"""Values in messages, and the names that they propose."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.options.convert import nearest, show, suggest


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\n b", "'a\\n b'"), (3, "3"), ("x" * 78, "'" + "x" * 78 + "'"), ("x" * 79, "'" + "x" * 59 + " ... " + "x" * 14 + "'")],
)  # fmt: skip
def test_a_value_is_one_short_line(value: object, text: str) -> None:
    assert show(value) == text


def test_white_space_of_a_value_is_folded() -> None:
    class Wide:
        def __repr__(self) -> str:
            return "a  \n b"

    assert show(Wide()) == "a b"


@pytest.mark.parametrize(
    ("name", "valid", "near"),
    [
        ("layuot", ["layout", "name"], "layout"),
        ("MEMORY-LIMIT", ["memory_limit"], "memory_limit"),
        ("usr1", ["USR1", "USR2"], "USR1"),
        ("x", ["layout"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name(name: str, valid: list[str], near: str | None) -> None:
    assert nearest(name, valid) == near


def test_all_names_are_proposed_where_they_are_few() -> None:
    eight = [f"option{number}" for number in range(8)]
    assert suggest("?", eight) == f"; valid: {', '.join(eight)}"
    assert suggest("?", [*eight, "another"]) == ""
    assert suggest("?", []) == ""
    assert suggest("?", ["only"]) == "; valid: only"
    assert suggest("optoin1", eight, str.upper) == "; did you mean 'OPTION1'?"
    assert suggest("?", ["b", "a", "b"], str.upper) == "; valid: A, B"
