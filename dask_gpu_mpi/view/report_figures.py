"""The figures of a report's page: lines or a heat map over time, bars, and a matrix. Imported late, since it imports Bokeh.

Axes and texts have a grey that is legible on light and on dark pages; backgrounds are the page's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    ColorBar,
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
)
from bokeh.palettes import Category10, Category20, Viridis256
from bokeh.plotting import figure

from dask_gpu_mpi.base.text import natural

#: Formats of values, as Bokeh's numerals.
BYTES, NUMBER = "0.[0] ib", "0.[0]"
#: Workers that are drawn as lines; more are rows of a heat map.
MOST_LINES = 8
#: Columns of a heat map.
MOST_COLUMNS = 2_000
#: Rows that each have a label.
MOST_LABELS = 64
GREY, FAINT = "#768390", "rgba(118, 131, 144, 0.25)"
SECONDS = "seconds after the start of the job"
#: As in Dask's task stream, but for failures, which are black there.
ACTION_COLOURS = {
    "compute": "#1f77b4",
    "failed": "#ff00c8",
    "transfer": "#e5383b",
    "disk-read": "#ff9800",
    "disk-write": "#8d6e00",
    "deserialize": "#9e9e9e",
    "other": "#9e9e9e",
}


def colours_of(times: Iterable[tuple[str, float]]) -> dict[str, str]:
    """A colour for each of the names that took longest in all; the others are grey."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, each in times:
        seconds[name] += each
    # the reds are those of transfers and failures
    palette = [colour for number, colour in enumerate(Category20[20]) if number not in (6, 7)]
    return dict(zip(sorted(seconds, key=lambda name: -seconds[name]), palette, strict=False))


def over_time(
    title: str,
    times: Sequence[float],
    rows: Mapping[str, Sequence[float | None]],
    form: str,
    high: float | None = None,
) -> Any:
    """A quantity of each worker over time: lines, or for many workers a heat map; `high` is the end of the scale."""
    names = sorted(rows, key=natural)
    values = np.array([rows[name] for name in names], dtype=float)
    if high is None:
        high = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    high = high or 1.0
    if len(names) <= MOST_LINES:
        return _lines(title, times, dict(zip(names, values, strict=True)), form, high)
    grid, step = on_grid(times, values)
    plot = _figure(title, _height(len(names)), y_range=(0, len(names)))
    place = {"x": times[0] - step / 2, "dw": step * grid.shape[1]}
    _heat_map(plot, names, grid, form, high, [("worker", "$y{custom}"), ("at", "$x{0.0} s")], **place)
    return plot


def matrix(title: str, cells: Mapping[tuple[str, str], float], form: str) -> Any:
    """Senders from left to right, receivers from top to bottom."""
    names = sorted({name for pair in cells for name in pair}, key=natural)
    place = {name: number for number, name in enumerate(names)}
    size = len(names)
    values = np.full((size, size), np.nan)
    for (sender, receiver), value in cells.items():
        values[place[receiver], place[sender]] = value
    plot = _figure(title, max(260, _height(size)), "from", x_range=(0, size), y_range=(0, size))
    tips = [("from", "$x{custom}"), ("to", "$y{custom}")]
    _heat_map(plot, names, values, form, max(cells.values(), default=0) or 1, tips, x=0, dw=size)
    plot.yaxis.axis_label = "to"
    columns = {number + 0.5: name for number, name in _labelled(names)}
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = FixedTicker(ticks=list(columns)), columns
    plot.xaxis.major_label_orientation = 0.9 if size > 8 else 0
    plot.xgrid.grid_line_color = None
    return plot


def bars(
    title: str,
    rows: Sequence[str],
    *,
    row: Sequence[int],
    left: Sequence[float],
    length: Sequence[float],
    name: Sequence[str],
    colour: Sequence[str],
    alpha: Sequence[float] | float = 1.0,
) -> Any:
    """Bars, each in one of the rows, which are counted from the top."""
    begins, lengths = np.array(left, dtype=float), np.array(length, dtype=float)
    source = ColumnDataSource(
        {
            "y": (len(rows) - np.array(row) - 0.5).astype("float32"),
            "left": begins,
            "right": begins + lengths,
            "seconds": lengths.astype("float32"),
            "row": [rows[each] for each in row],
            "name": list(name),
            "colour": list(colour),
            "alpha": np.broadcast_to(np.array(alpha, dtype="float32"), lengths.shape),
        }
    )
    plot = _figure(title, max(160, _height(len(rows))), y_range=(0, max(1, len(rows))))
    plot.hbar(
        y="y",
        left="left",
        right="right",
        height=0.85,
        color="colour",
        alpha="alpha",
        line_width=0.5,
        source=source,
    )
    _label_rows(plot, [text if len(text) <= 40 else f"{text[:39]}…" for text in rows])
    plot.add_tools(HoverTool(tooltips=[("", "@row"), ("", "@name"), ("took", "@seconds{0.000} s")]))
    return plot


def on_grid(times: Sequence[float], values: Any) -> tuple[Any, float]:
    """The values as columns of equal width, which an image has, and that width in seconds; a gap is not a number.

    >>> on_grid([0.0, 1.0, 2.0, 5.0], np.array([[1.0, 2.0, 3.0, 4.0]]))
    (array([[ 1.,  2.,  3., nan, nan,  4.]]), 1.0)
    """
    if len(times) < 2:
        return values, 1.0
    at = np.array(times, dtype=float) - times[0]
    usual = float(np.median(np.diff(at)))
    step = max(usual, float(at[-1]) / MOST_COLUMNS) or 1.0
    columns = np.rint(at / step).astype(int)
    grid = np.full((values.shape[0], columns[-1] + 1), np.nan)
    # A sample that came a little late leaves its column empty and shares another's: it also fills the column before.
    early = columns[1:] - columns[:-1] == 2
    close = np.diff(at) < 1.9 * step
    grid[:, columns[1:][early & close] - 1] = values[:, 1:][:, early & close]
    grid[:, columns] = values
    return grid, step


def _lines(title: str, times: Sequence[float], rows: Mapping[str, Any], form: str, high: float) -> Any:
    plot = _figure(title, 260, y_range=(0, high * 1.05))
    plot.yaxis.ticker, plot.yaxis.formatter = _ticker(form), NumeralTickFormatter(format=form)
    for colour, (name, values) in zip(Category10[10], rows.items(), strict=False):
        columns = {"x": np.array(times), "y": values.astype("float32"), "name": [name] * len(times)}
        source = ColumnDataSource(columns)
        plot.line("x", "y", source=source, color=colour, line_width=1.8, legend_label=f"worker {name}")
        plot.scatter("x", "y", source=source, color=colour, size=3)  # a line of one point is not drawn
    plot.add_tools(HoverTool(tooltips=[("worker", "@name"), ("at", "@x{0.0} s"), ("value", f"@y{{{form}}}")]))
    legend = plot.legend[0]
    legend.label_text_color, legend.background_fill_alpha, legend.border_line_color = GREY, 0, FAINT
    legend.click_policy = "hide"
    plot.add_layout(legend, "right")
    return plot


def _heat_map(
    plot: Any,
    names: Sequence[str],
    values: Any,
    form: str,
    high: float,
    tips: list[tuple[str, str]],
    **place: float,
) -> None:
    """Draw values, a named row of them below the other, with a scale of colours."""
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=high, nan_color="rgba(0, 0, 0, 0)")
    image = values[::-1].astype("float32")
    plot.image(image=[image], y=0, dh=len(names), color_mapper=mapper, level="image", **place)
    _label_rows(plot, names)
    hover = {"names": list(names)}
    formatters = {
        "$x": CustomJSHover(args=hover, code="return names[Math.floor(special_vars.x)] ?? ''"),
        "$y": CustomJSHover(
            args=hover, code="return names[names.length - 1 - Math.floor(special_vars.y)] ?? ''"
        ),
    }
    plot.add_tools(HoverTool(tooltips=[*tips, ("", f"@image{{{form}}}")], formatters=formatters))
    bar = ColorBar(
        color_mapper=mapper,
        ticker=_ticker(form),
        formatter=NumeralTickFormatter(format=form),
        background_fill_alpha=0,
        major_label_text_color=GREY,
        width=10,
        padding=4,
    )
    plot.add_layout(bar, "right")


def _figure(title: str, height: int, x_label: str = SECONDS, **more: Any) -> Any:
    plot: Any = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,xwheel_zoom,reset,save",
        toolbar_location="above",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=FAINT,
        **more,
    )
    plot.toolbar.logo = None
    plot.title.text_color = GREY
    plot.grid.grid_line_color = FAINT
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GREY
    plot.xaxis.axis_label = x_label
    return plot


def _height(rows: int) -> int:
    return min(1200, 110 + max(14, min(28, 600 // max(1, rows))) * rows)


def _label_rows(plot: Any, names: Sequence[str]) -> None:
    labels = {len(names) - number - 0.5: name for number, name in _labelled(names)}
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = FixedTicker(ticks=list(labels)), labels
    plot.ygrid.grid_line_color = None


def _labelled(names: Sequence[str]) -> list[tuple[int, str]]:
    """The rows that have a label: of very many some."""
    every = max(1, math.ceil(len(names) / MOST_LABELS))
    return [(number, name) for number, name in enumerate(names) if number % every == 0]


def _ticker(form: str) -> AdaptiveTicker:
    """Round numbers, also of bytes."""
    if form == BYTES:
        return AdaptiveTicker(base=1024, mantissas=[2**power for power in range(10)], num_minor_ticks=0)
    return AdaptiveTicker(num_minor_ticks=0)
