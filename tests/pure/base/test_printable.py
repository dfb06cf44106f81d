"""Texts of others, made harmless."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.text import printable, text_of


@pytest.mark.parametrize("text", ["", "h1", "Größe 5 × 3 — 世界", "<b>&'\""])
def test_what_can_be_shown_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("letter", ["\x1b", "\n", "\0", "\x9b", "\udcff", "\u202e", "\ufffe", "\u2028"])
def test_what_moves_the_cursor_or_is_no_xml_is_replaced(letter: str) -> None:
    assert printable(f"a{letter}b") == "a\ufffdb"


def test_an_exception_that_can_not_say_what_it_is() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(Broken()) == ""
