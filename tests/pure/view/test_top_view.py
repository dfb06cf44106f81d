"""The keys of `top`, and what it draws."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dask_gpu_mpi.view.snapshot import Row, snapshot_of
from dask_gpu_mpi.view.top_view import (
    COLUMNS,
    SORTS,
    View,
    folded,
    keys_of,
    page_of,
    pair,
    plain,
    press,
    rows_of_screen,
    screen,
    short,
)
from support.mocks.snapshots import GIB, cluster

ROWS = snapshot_of(*cluster(3, 2), 7.0).rows
MANY = snapshot_of(*cluster(64, 8), 7.0).rows


def after(keys: str, rows: tuple[Row, ...] = ROWS, height: int = 20) -> View:
    view = View()
    for key in keys.split():
        assert press(view, key, rows, height)
    return view


def test_s_goes_through_all_columns_and_back() -> None:
    assert [after("s " * times).sort for times in range(len(SORTS) + 1)] == [*SORTS, "NODE"]


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
    assert [row.worker for row in page_of(after("n n"), ROWS, 20).rows] == ["1-0", "1-1"]
    assert after("n", ()).node is None
    gone = View(node="gone")
    press(gone, "n", ROWS, 20)
    assert gone.node == "node0000"


def test_rows_fold_where_they_are_more_than_the_screen_has() -> None:
    assert not page_of(View(), MANY, 512).folded
    page = page_of(View(), MANY, 100)
    assert (page.folded, len(page.rows), page.total) == (True, 64, 64)
    # of one node all are shown
    assert not page_of(View(node="node0001"), MANY, 4).folded
    assert after("f", MANY, 100).fold is False
    assert after("f", MANY, 600).fold is True


def test_a_node_has_sums_the_mean_use_the_highest_temperature_and_every_reason_for_lower_clocks() -> None:
    hot = {"gpu_temperature": 80, "gpu_power": 300.0, "gpu_pcie": 1.0, "gpu_slowed": "power+heat"}
    cool = {"gpu_temperature": 50, "gpu_power": 100.0, "gpu_slowed": "", "status": "paused", "rmm_used": None}
    one, other, _ = folded([replace(ROWS[0], gpu_use=None, **hot), replace(ROWS[1], **cool), *ROWS[2:]])
    assert {name: value for name, value in vars(one).items() if value is not None} == {
        "node": "node0000", "worker": "2", "status": "(1 paused)", "gpu_use": 1, "gpu_memory": 20 * GIB,
        "gpu_memory_total": 160 * GIB, "gpu_temperature": 80, "gpu_power": 400.0, "gpu_pcie": 1.0, "gpu_slowed": "heat+power",
        "rmm_used": GIB, "rmm_total": 80 * GIB, "host_memory": 4 * GIB, "host_limit": 128 * GIB, "running": 4, "waiting": 14,
        "received": 0, "sent": 0, "spilled": 22,
    }  # fmt: skip
    assert (other.gpu_temperature, other.gpu_power, other.gpu_slowed) == (None, None, None)


@pytest.mark.parametrize(
    ("used", "style"), [(79, ""), (80, "yellow"), (94, "yellow"), (95, "red"), (None, "")]
)
def test_a_column_warns_of_memory_that_is_nearly_full(used: int | None, style: str) -> None:
    column = next(column for column in COLUMNS if column.total)
    row: Any = SimpleNamespace(**{column.field: used, column.total: 100})
    assert column.cell(row)[1] == style


def test_scrolling_stays_on_the_rows() -> None:
    view, firsts = View(fold=False), []
    for key in ("down", "page up", "page down", "page down", "j", "k", "up"):
        assert press(view, key, ROWS, 2)
        firsts.append(page_of(view, ROWS, 2).first)
    assert firsts == [1, 0, 2, 4, 4, 3, 2]
    # a larger screen, or rows that are gone, leave nothing empty
    assert page_of(view, ROWS, 5).first == 1
    assert page_of(view, ROWS[:1], 2).first == 0
    assert page_of(view, (), 2).rows == ()


def test_keys_and_the_sequences_of_a_terminal() -> None:
    assert [*keys_of("sr\x1b[A\x1bOB\x1b[5~\x1b[6~")] == ["s", "r", "up", "down", "page up", "page down"]
    assert [*keys_of("\x1b")] == []


@given(
    st.lists(st.sampled_from(["s", "r", "n", "N", "f", "j", "k", "up", "page down"])),
    st.integers(1, 30),
    st.booleans(),
)
def test_any_keys_show_rows_that_are_there(keys: list[str], height: int, empty: bool) -> None:
    view, rows = View(), () if empty else ROWS
    for key in keys:
        assert press(view, key, rows, height)
        page = page_of(view, rows, height)
        assert len(page.rows) == min(height, page.total)
        assert 0 <= page.first <= max(0, page.total - height)


# -- what `top` draws


SMALL = snapshot_of(*cluster(2, 2), 7.0)
LARGE = replace(SMALL, rows=MANY)


def drawn(renderable: Any, width: int = 80) -> list[str]:
    file = StringIO()
    Console(file=file, width=width, highlight=False).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_small_cluster_in_80_columns() -> None:
    lines = drawn(screen(SMALL, View(), 80, 24))
    assert lines[0] == "nodes 2, GPUs 4, workers 4  tls://10.0.0.1:8786"
    assert lines[1] == "USE 2%  GPU MEM 40/320G  HOST MEM 8.0/256G  RUN 8  WAIT 28  SPILL 44"
    assert lines[2] == "NODE     WORKER   GPU USE%  GPU MEM      RMM HOST MEM RUN WAIT  IN/s OUT/s SPILL"
    assert lines[3] == "node0000 0-0        0    0   10/80G  1.0/40G  2.0/64G   2    7     -     -    11"
    assert lines[6] == "node0001 1-1        1    3   10/80G  1.0/40G  2.0/64G   2    7     -     -    11"
    assert lines[-2] == "sort: NODE  node: all  rows 1-4 of 4"
    assert lines[-1].startswith("q quit")


def test_512_gpus_are_folded_to_their_nodes() -> None:
    rows = (Row(node="node0000", worker="0-0"), *LARGE.rows[1:])
    lines = drawn(screen(replace(LARGE, rows=rows), View(), 90, 24), 90)
    assert len(lines) == 24
    assert lines[0].startswith("nodes 64, GPUs 511, workers 512 (1 lost)")
    assert lines[3].startswith("node0000 8 (1 lost) ")
    assert lines[4].split()[:5] == ["node0001", "8", "12", "80/640G", "8.0/320G"]
    assert "rows 1-19 of 64" in lines[-2]
    assert "one row per node" in lines[-2]


@given(st.integers(10, 200), st.integers(8, 60), st.booleans())
@settings(deadline=None)
def test_it_fits_every_screen(width: int, height: int, large: bool) -> None:
    lines = drawn(screen(LARGE if large else SMALL, View(), width, height), width)
    assert max(map(len, lines)) <= max(width, 20)
    assert len(lines) <= height


def test_names_are_cut_and_columns_dropped_on_a_narrow_screen_alone() -> None:
    long = replace(SMALL, rows=tuple(replace(row, node=f"a-long-name-of-a-{row.node}") for row in SMALL.rows))
    narrow, wide = drawn(screen(long, View(), 50, 24), 50), drawn(screen(long, View(), 120, 24), 120)
    assert "USE%" in narrow[2]
    assert "OUT/s" not in narrow[2]
    assert narrow[3].startswith("..ode0000 0-0 ")
    in_file = drawn(plain(long, None), 1000)
    for lines in (wide, in_file):
        assert lines[3].startswith("a-long-name-of-a-node0000 0-0 ")


def test_a_worker_that_does_not_run_says_so() -> None:
    rows = (replace(SMALL.rows[0], status="paused"), Row(node="n", worker="0-1"), *SMALL.rows[2:])
    lines = drawn(screen(replace(SMALL, rows=rows), View(), 100, 24), 100)
    assert "0-0 paused" in lines[3]
    assert "0-1 lost" in lines[4]
    assert lines[4].split()[3:] == ["-"] * 10
    assert "workers 4 (1 paused, 1 lost)" in lines[0]
    empty = replace(SMALL, rows=())
    for found in (screen(empty, View(), 80, 24), plain(empty, None)):
        assert drawn(found)[1] == "no worker yet"


def test_the_time_left_and_the_last_warnings() -> None:
    events = tuple((0.0, f"event {number}") for number in range(5))
    told = replace(SMALL, end=7.0 + 3725, notes=("slow network",), events=events[:2])
    lines = drawn(screen(told, View(), 80, 24))
    assert lines[0].startswith("1:02:05 left, nodes 2")
    assert lines[7] == "at start: slow network"
    assert lines[8].endswith(" event 0")
    told = replace(told, events=events)
    assert [line.split()[-1] for line in drawn(screen(told, View(), 80, 24))[7:10]] == ["2", "3", "4"]
    assert rows_of_screen(told, 24) == 16
    # not on a screen, all of them
    assert len([line for line in drawn(plain(told, None), 1000) if "event" in line]) == 5


@given(st.integers(0, 2**59))
def test_bytes_have_their_width(number: int) -> None:
    assert len(short(number)) <= 5
    assert len(pair(number, max(number, 1))) <= 8
