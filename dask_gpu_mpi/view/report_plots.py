"""The figures of a report's page. Bokeh is imported here, and by nobody before there is a page to be made.

Axes and texts have a grey that is legible on light and on dark pages, backgrounds are the page's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
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

__all__ = [
    "BYTES",
    "NUMBER",
    "by_name",
    "colours_of",
    "matrix",
    "on_grid",
    "over_time",
    "stacks",
    "steps",
    "tasks",
]

#: Formats of values, as Bokeh's numerals.
BYTES, NUMBER = "0.[0] ib", "0.[0]"
#: Workers that are drawn as lines; more are rows of a heat map.
MOST_LINES = 8
#: Columns of a heat map.
MOST_COLUMNS = 2_000
#: Rows that each have a name beside them.
MOST_LABELS = 64
GREY, FAINT = "#768390", "rgba(118, 131, 144, 0.25)"
_TOOLS = "pan,box_zoom,xwheel_zoom,reset,save"
#: Of what is no computation: as in Dask's task stream, but for failures, which are black there.
ACTION_COLOURS = {
    "failed": "#ff00c8",
    "transfer": "#e5383b",
    "disk-read": "#ff9800",
    "disk-write": "#ff9800",
    "deserialize": "#9e9e9e",
    "other": "#9e9e9e",
}


def by_name(name: str) -> list[Any]:
    """Sorts names as people count: 2 comes before 10.

    >>> sorted(["10-0", "2-0", "2-cpu-0"], key=by_name)
    ['2-0', '2-cpu-0', '10-0']
    """
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def _figure(title: str, height: int, x_label: str = "seconds after the start of the job", **more: Any) -> Any:
    plot: Any = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
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


def _name_rows(plot: Any, names: Sequence[str]) -> None:
    """Name the rows of a figure, from the top; of very many some."""
    every = max(1, math.ceil(len(names) / MOST_LABELS))
    places = {len(names) - number - 0.5: name for number, name in enumerate(names) if number % every == 0}
    plot.yaxis.ticker = FixedTicker(ticks=list(places))
    plot.yaxis.major_label_overrides = places
    plot.ygrid.grid_line_color = None


def _height(rows: int) -> int:
    return min(1200, 110 + max(14, min(28, 600 // max(1, rows))) * rows)


def _names_hover(names: Sequence[str], axis: str) -> CustomJSHover:
    """What shows the name of the row (or column) below the mouse."""
    index = "names.length - 1 - Math.floor(special_vars.y)" if axis == "y" else "Math.floor(special_vars.x)"
    return CustomJSHover(args={"names": list(names)}, code=f"return names[{index}] ?? ''")


def over_time(
    title: str,
    times: Sequence[float],
    rows: Mapping[str, Sequence[float | None]],
    form: str,
    *,
    high: float | None = None,
) -> Any:
    """A quantity of each worker over time: lines, or of many workers a heat map.

    Parameters
    ----------
    rows : mapping
        By worker: its values, None where there was none.
    form : str
        Format of the values.
    high : float, optional
        The end of their scale; default: their maximum.
    """
    names = sorted(rows, key=by_name)
    values = np.array([rows[name] for name in names], dtype=float)
    if high is None:
        high = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    high = high or 1.0
    if len(names) <= MOST_LINES:
        return _lines(title, times, dict(zip(names, values, strict=True)), form, high)
    plot = _figure(title, _height(len(names)), y_range=(0, len(names)))
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=high, nan_color="rgba(0, 0, 0, 0)")
    grid, step = on_grid(times, values)
    plot.image(
        image=[grid[::-1].astype("float32")],
        x=times[0] - step / 2,
        y=0,
        dw=step * grid.shape[1],
        dh=len(names),
        color_mapper=mapper,
        level="image",
    )
    _name_rows(plot, names)
    plot.add_tools(
        HoverTool(
            tooltips=[("worker", "$y{custom}"), ("at", "$x{0.0} s"), ("value", f"@image{{{form}}}")],
            formatters={"$y": _names_hover(names, "y")},
        )
    )
    plot.add_layout(_colour_bar(mapper, form), "right")
    return plot


def on_grid(times: Sequence[float], values: Any) -> tuple[Any, float]:
    """The values as columns of equal width, which an image has, and that width in seconds; a gap is not a number.

    Examples
    --------
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
    # a sample that came a little late leaves its column empty and shares another's: it is also that of the column before
    early = columns[1:] - columns[:-1] == 2
    close = np.diff(at) < 1.9 * step
    grid[:, columns[1:][early & close] - 1] = values[:, 1:][:, early & close]
    grid[:, columns] = values
    return grid, step


def _lines(title: str, times: Sequence[float], rows: Mapping[str, Any], form: str, high: float) -> Any:
    plot = _figure(title, 260, y_range=(0, high * 1.05))
    plot.yaxis.ticker, plot.yaxis.formatter = _ticker(form), NumeralTickFormatter(format=form)
    for number, (name, values) in enumerate(rows.items()):
        source = ColumnDataSource(
            {"x": np.array(times), "y": values.astype("float32"), "name": [name] * len(times)}
        )
        colour = Category10[10][number]
        plot.line("x", "y", source=source, color=colour, line_width=1.8, legend_label=name)
        # a line of one point is none
        plot.scatter("x", "y", source=source, color=colour, size=3)
    plot.add_tools(HoverTool(tooltips=[("worker", "@name"), ("at", "@x{0.0} s"), ("value", f"@y{{{form}}}")]))
    legend = plot.legend[0]
    legend.label_text_color, legend.background_fill_alpha, legend.border_line_color = GREY, 0, FAINT
    legend.click_policy = "hide"
    plot.add_layout(legend, "right")
    return plot


def _ticker(form: str) -> AdaptiveTicker:
    """Round numbers, also of bytes."""
    if form == BYTES:
        return AdaptiveTicker(base=1024, mantissas=[2**power for power in range(10)], num_minor_ticks=0)
    return AdaptiveTicker(num_minor_ticks=0)


def _colour_bar(mapper: LinearColorMapper, form: str) -> ColorBar:
    return ColorBar(
        color_mapper=mapper,
        ticker=_ticker(form),
        formatter=NumeralTickFormatter(format=form),
        background_fill_alpha=0,
        major_label_text_color=GREY,
        width=10,
        padding=4,
    )


def steps(
    title: str, rows: Sequence[str], bars: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> Any:
    """Steps as bars, each in its row: ``row``, ``name``, ``begin``, ``end``."""
    place = {row: len(rows) - number - 0.5 for number, row in enumerate(rows)}
    source = ColumnDataSource(
        {
            "y": [place[bar["row"]] for bar in bars],
            "left": [bar["begin"] for bar in bars],
            "right": [bar["end"] for bar in bars],
            "row": [bar["row"] for bar in bars],
            "name": [bar["name"] for bar in bars],
            "seconds": [bar["end"] - bar["begin"] for bar in bars],
            "color": [colours.get(bar["name"], GREY) for bar in bars],
        }
    )
    plot = _figure(title, _height(len(rows)), y_range=(0, max(1, len(rows))))
    plot.hbar(y="y", left="left", right="right", height=0.8, color="color", source=source)
    _name_rows(plot, rows)
    plot.add_tools(HoverTool(tooltips=[("", "@row"), ("step", "@name"), ("took", "@seconds{0.000} s")]))
    return plot


def colours_of(names: Sequence[str], weights: Mapping[str, float]) -> dict[str, str]:
    """A colour for each name; those that weigh most have one of their own."""
    first = sorted(names, key=lambda name: weights.get(name, 0.0), reverse=True)[:19]
    # the reds are those of transfers and failures
    palette = [colour for number, colour in enumerate(Category20[20]) if number not in (6, 7)]
    return {name: palette[number % len(palette)] for number, name in enumerate(first)}


def tasks(title: str, data: Mapping[str, Any], colours: Mapping[str, str]) -> Any:
    """The task stream: a row for each thread of a worker."""
    order = sorted(
        range(len(data["lanes"])), key=lambda lane: (by_name(data["lanes"][lane][0]), data["lanes"][lane][1])
    )
    several = {lane[0] for lane in data["lanes"] if lane[1]}
    labels = [
        f"{data['lanes'][lane][0]}"
        + (f" thread {data['lanes'][lane][1]}" if data["lanes"][lane][0] in several else "")
        for lane in order
    ]
    place = {lane: len(order) - number - 0.5 for number, lane in enumerate(order)}
    actions = [data["actions"][action] for action in data["action"]]
    names = [data["names"][name] for name in data["name"]]
    start, length = np.array(data["start"], dtype=float), np.array(data["length"], dtype=float)
    source = ColumnDataSource(
        {
            "y": np.array([place[lane] for lane in data["lane"]], dtype="float32"),
            "left": start,
            "right": start + length,
            "seconds": length.astype("float32"),
            "worker": [data["lanes"][lane][0] for lane in data["lane"]],
            "name": [
                name if action == "compute" else f"{action}: {name}"
                for name, action in zip(names, actions, strict=True)
            ],
            "color": [
                ACTION_COLOURS.get(action) or colours.get(name, GREY)
                for name, action in zip(names, actions, strict=True)
            ],
            "alpha": np.array(
                [1.0 if action in ("compute", "failed") else 0.4 for action in actions], dtype="float32"
            ),
        }
    )
    plot = _figure(title, max(220, _height(len(order))), y_range=(0, max(1, len(order))))
    plot.hbar(
        y="y",
        left="left",
        right="right",
        height=0.85,
        fill_color="color",
        line_color="color",
        line_width=0.5,
        fill_alpha="alpha",
        line_alpha="alpha",
        source=source,
    )
    _name_rows(plot, labels)
    plot.add_tools(
        HoverTool(tooltips=[("task", "@name"), ("worker", "@worker"), ("took", "@seconds{0.000} s")])
    )
    return plot


def stacks(title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Any:
    """A bar for each name, made of parts."""
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
    y = [len(names) - number - 0.5 for number in range(len(names))]
    source = ColumnDataSource(
        {"y": y, "name": list(names), **{part: list(values) for part, values in parts.items()}}
    )
    plot = _figure(
        title, max(160, _height(len(names))), "seconds of all workers", y_range=(0, max(1, len(names)))
    )
    plot.hbar_stack(
        list(parts),
        y="y",
        height=0.8,
        source=source,
        color=[ACTION_COLOURS.get(part, "#1f77b4") for part in parts],
        legend_label=list(parts),
    )
    _name_rows(plot, shown)
    plot.add_tools(HoverTool(tooltips=[("tasks", "@name"), ("$name", "@$name{0.00} s")]))
    legend = plot.legend[0]
    legend.label_text_color, legend.background_fill_alpha, legend.border_line_color = GREY, 0, FAINT
    plot.add_layout(legend, "right")
    return plot


def matrix(title: str, names: Sequence[str], cells: Mapping[tuple[str, str], float], form: str) -> Any:
    """Senders from left to right, receivers from top to bottom."""
    place: Callable[[str], int] = {name: number for number, name in enumerate(names)}.__getitem__
    values = np.full((len(names), len(names)), np.nan, dtype="float32")
    for (sender, receiver), value in cells.items():
        values[len(names) - 1 - place(receiver), place(sender)] = value
    mapper = LinearColorMapper(
        palette=Viridis256, low=0, high=max(cells.values(), default=0) or 1, nan_color="rgba(0, 0, 0, 0)"
    )
    size = len(names)
    plot = _figure(title, max(260, _height(size)), "from", x_range=(0, size), y_range=(0, size))
    plot.image(image=[values], x=0, y=0, dw=size, dh=size, color_mapper=mapper, level="image")
    _name_rows(plot, names)
    plot.yaxis.axis_label = "to"
    every = max(1, math.ceil(size / MOST_LABELS))
    columns = {number + 0.5: name for number, name in enumerate(names) if number % every == 0}
    plot.xaxis.ticker = FixedTicker(ticks=list(columns))
    plot.xaxis.major_label_overrides = columns
    plot.xaxis.major_label_orientation = 0.9 if size > 8 else 0
    plot.xgrid.grid_line_color = None
    plot.add_tools(
        HoverTool(
            tooltips=[("from", "$x{custom}"), ("to", "$y{custom}"), ("", f"@image{{{form}}}")],
            formatters={"$x": _names_hover(names, "x"), "$y": _names_hover(names, "y")},
        )
    )
    plot.add_layout(_colour_bar(mapper, form), "right")
    return plot
