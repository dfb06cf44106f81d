"""Parts of a picture."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.plan.picture import MOST_LINES, Part, at, flow, paragraph, rectangle, stack, text, titled

BOX = Part("<b/>", 40, 10)


def test_parts_in_rows() -> None:
    found = flow([BOX, Part("<c/>", 20, 30), BOX, BOX], 100, 5)
    assert (found.width, found.height) == (85, 45)
    assert found.markup.split("\n") == [
        '<b/><g transform="translate(45 0)"><c/></g>',
        '<g transform="translate(0 35)"><b/></g>',
        '<g transform="translate(45 35)"><b/></g>',
        "",
    ]


@pytest.mark.parametrize(("limit", "size"), [(85, (85, 10)), (84, (40, 25)), (10, (40, 25))])
def test_the_width_of_a_row(limit: int, size: tuple[int, int]) -> None:
    found = flow([BOX, BOX], limit, 5)
    assert (found.width, found.height) == size


def test_parts_below_each_other() -> None:
    found = stack([BOX, BOX])
    assert (found.width, found.height) == (40, 28)
    assert (stack([]).width, stack([]).height) == (0, 0)
    assert at(1, 2, Part("", 0, 0)) == ""


def test_text_is_escaped_and_shortened() -> None:
    assert text(1, 2, "a<b>\x1b&", "head") == '<text class="head" x="1" y="2">a&lt;b&gt;\ufffd&amp;</text>'
    assert text(1, 2, "") == ""
    # 12 * 0.61 pixels for each letter
    assert (
        text(0, 0, "abcdefgh", limit=37, anchor="end") == '<text x="0" y="0" text-anchor="end">abcd…</text>'
    )
    assert ">abcde</text>" in text(0, 0, "abcde", limit=37)
    assert titled("<t>", BOX).markup == "<g><title>&lt;t&gt;</title><b/></g>"
    assert rectangle("node", 5, 6) == '<rect class="node" width="5" height="6" rx="6"/>'


def test_paragraphs() -> None:
    found = paragraph(["one two three", "word " * 100], 60, "warning")
    lines = found.markup.split("</text>")[:-1]
    assert lines[0] == '<text class="warning" x="0" y="16">one two'
    assert lines[1] == '<text class="warning" x="12" y="32">three'
    assert len(lines) == 2 + MOST_LINES
    assert lines[-1].endswith("…")
    assert (found.width, found.height) == (60, 16 * len(lines) + 4)
