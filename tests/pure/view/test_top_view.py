"""The keys of `top`: order, node, fold, scroll position."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.view.snapshot import Row, snapshot_of
from dask_gpu_mpi.view.top_view import SORTS, View, folded, keys_of, page_of, press, share
from support.mocks.snapshots import GIB, cluster

ROWS = snapshot_of(*cluster(3, 2), 7.0).rows
LARGE = snapshot_of(*cluster(64, 8), 7.0).rows


def after(keys: str, rows: tuple[Row, ...] = ROWS, height: int = 20) -> View:
    view = View()
    for key in keys.split():
        assert press(view, key, rows, height)
    return view


def workers(view: View, height: int = 20) -> list[str]:
    return [row.worker for row in page_of(view, ROWS, height).rows]


def test_the_plans_order_comes_first() -> None:
    assert workers(View()) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert workers(after("r")) == ["2-1", "2-0", "1-1", "1-0", "0-1", "0-0"]


def test_s_goes_through_all_columns_and_back() -> None:
    view, seen = View(), []
    for _ in SORTS:
        seen.append(view.sort)
        press(view, "s", ROWS, 20)
    assert (seen, view.sort) == ([*SORTS], "node")


def test_the_largest_figure_is_first_and_what_is_not_known_last() -> None:
    rows = (replace(ROWS[0], gpu_use=None), *ROWS[1:])
    view = after("s")
    assert [row.gpu_use for row in page_of(view, rows, 20).rows] == [5, 4, 3, 2, 1, None]
    press(view, "r", rows, 20)
    assert [row.gpu_use for row in page_of(view, rows, 20).rows] == [1, 2, 3, 4, 5, None]
    press(view, "s", rows, 20)
    assert not view.reverse


def test_n_goes_through_the_nodes_and_back_to_all() -> None:
    assert [after("n " * times).node for times in range(1, 5)] == ["node0000", "node0001", "node0002", None]
    assert after("N").node == "node0002"
    assert workers(after("n n")) == ["1-0", "1-1"]
    assert after("n", ()).node is None
    gone = View(node="gone")
    press(gone, "n", ROWS, 20)
    assert gone.node == "node0000"


def test_rows_fold_where_they_are_more_than_the_screen_has() -> None:
    assert not page_of(View(), LARGE, 512).folded
    page = page_of(View(), LARGE, 100)
    assert (page.folded, len(page.rows), page.total) == (True, 64, 64)
    # of one node all are shown
    assert not page_of(View(node="node0001"), LARGE, 4).folded
    assert after("f", LARGE, 100).fold is False
    assert after("f", LARGE, 600).fold is True


def test_a_node_has_sums_and_the_mean_of_the_use() -> None:
    (one, *_) = folded(
        [replace(ROWS[0], gpu_use=None), replace(ROWS[1], status="paused", rmm_used=None), *ROWS[2:]]
    )
    assert (one.node, one.worker, one.status) == ("node0000", "2", "(1 paused)")
    assert (one.gpu_use, one.gpu_memory, one.gpu_memory_total) == (1, 20 * GIB, 160 * GIB)
    assert (one.rmm_used, one.rmm_total) == (GIB, 80 * GIB)
    assert (one.running, one.waiting, one.host_memory) == (4, 14, 4 * GIB)
    assert one.received_rate is None


def test_scrolling_stays_on_the_rows() -> None:
    view = View(fold=False)
    for key, first in (
        ("down", 1),
        ("page up", 0),
        ("page down", 2),
        ("page down", 4),
        ("j", 4),
        ("k", 3),
        ("up", 2),
    ):
        press(view, key, ROWS, 2)
        assert page_of(view, ROWS, 2).first == first, key
    # a larger screen, or rows that are gone, leave nothing empty
    assert page_of(view, ROWS, 5).first == 1
    assert page_of(view, ROWS[:1], 2).first == 0
    assert page_of(view, (), 2).rows == ()


def test_q_quits_and_other_keys_do_nothing() -> None:
    view = View()
    assert not press(view, "q", ROWS, 20)
    assert press(view, "x", ROWS, 20)
    assert view == View()


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("sr", ["s", "r"]),
        ("\x1b[A\x1bOB\x1b[5~\x1b[6~", ["up", "down", "page up", "page down"]),
        ("\x1b", []),
        ("s\x1b[1;5Aq", ["s"]),
    ],
)
def test_keys(text: str, keys: list[str]) -> None:
    assert [*keys_of(text)] == keys


@given(
    st.lists(st.sampled_from(["s", "r", "n", "N", "f", "j", "k", "up", "page down"])),
    st.integers(1, 30),
    st.booleans(),
)
def test_any_keys_show_rows_that_are_there(keys: list[str], height: int, empty: bool) -> None:
    view, rows = View(), () if empty else ROWS
    for key in keys:
        press(view, key, rows, height)
        page = page_of(view, rows, height)
        assert len(page.rows) == min(height, page.total)
        assert 0 <= page.first <= max(0, page.total - height)


def test_a_share() -> None:
    assert (share(None, 1), share(1, 0), share(1, 2)) == (None, None, 0.5)
