"""The self-contained page of a report: a template, `report.html`, with figures that Bokeh draws of the report's data.

`page` makes it, of a tab for each function below, then come the figures. `view.report_data` imports this late, since it imports
Bokeh. ``python -m dask_gpu_mpi.view.report_page FILE.json FILE.html`` makes the page of an existing JSON file.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.embed import components
from bokeh.palettes import Category10, Category20, Viridis256
from bokeh.plotting import figure
from bokeh.resources import Resources
from dask.utils import natural_sort_key
from jinja2 import Environment
from markupsafe import Markup, escape

from dask_gpu_mpi.base.files import replace
from dask_gpu_mpi.base.text import fold_names, format_bytes, one_line
from dask_gpu_mpi.base.versions import documentation
from dask_gpu_mpi.machine.nvidia import SLOWED
from dask_gpu_mpi.view.heartbeat import MOST_GPUS, of_gpu
from dask_gpu_mpi.view.report_summary import CALLED, SHARES, headline, slowed_of

TEMPLATE = Path(__file__).with_name("report.html")
#: Ranks with all their processes, rows of tables, and pairs of workers that are shown.
MOST_RANKS, MOST_ROWS, MOST_PAIRS = 8, 256, 20


def page(data: Mapping[str, Any]) -> str:
    """The page as text."""
    record = data["record"]
    # what the template gets of each tab, and the figures of each
    tabs: dict[str, Any] = {"start": _start(data["start"])}
    if record is not None:
        tabs |= {
            "gpus": _gpus(record),
            "memory": _memory(record),
            "tasks": _tasks(record["tasks"]),
            "prefixes": _prefixes(record["prefixes"]),
            "transfers": _transfers(record),
            "events": _events(record),
        }
    figures = {tab: content.pop("figures", []) for tab, content in tabs.items()}
    all_figures = [figure for of_tab in figures.values() for figure in of_tab]
    script, elements = components(all_figures) if all_figures else ("", ())
    places = iter(elements)
    svg = data["plan_picture"].encode("utf-8", "backslashreplace")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": _size, "value": _value, "linked": _linked}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        data,
        **tabs,
        nodes=fold_names(host["host"] for host in data["plan"]["hosts"]),
        began_at=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(data["job"]["began"])),
        headline=headline(data),
        bars=_bars(data["summary"]),
        called=CALLED,
        picture=base64.b64encode(svg).decode(),
        figures={tab: [next(places) for _ in of_tab] for tab, of_tab in figures.items()},
        bokeh=Resources("inline", components=["bokeh"]).render(),
        script=script,
    )


def _bars(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the first screen: the mean, and the workers that computed least; a switch shows the others."""
    rows = sorted(
        summary["workers"], key=lambda worker: (worker["kind"] != summary["kind"], worker["computing"])
    )
    mean = {**summary["mean"], "name": "mean", "host": ""} if rows else {}
    return [
        {
            "name": row["name"],
            "host": row["host"],
            "gpu": None if row["gpu"] is None else f"{100 * row['gpu']:.0f} %",
            "parts": [(name, CALLED[name], round(100 * row[name], 1)) for name in SHARES if row[name]],
        }
        for row in ([mean] if len(rows) > 1 else []) + rows[:MOST_ROWS]
    ]


def _start(start: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of each rank; of many ranks, those of their agents and workers are left out."""
    all_processes = len({step["rank"] for step in start["steps"]}) <= MOST_RANKS
    steps = [step for step in start["steps"] if all_processes or step["process"] in ("rank", "scheduler")]
    if not steps:
        return {"steps": []}
    labels = [
        f"rank {step['rank']} {step['host']}" + ("" if step["process"] == "rank" else f": {step['process']}")
        for step in steps
    ]
    names = [step["name"] for step in steps]
    lengths = [step["end"] - step["begin"] for step in steps]
    colours = colours_of(zip(names, lengths, strict=True))
    figure = bars(
        "start-up",
        list(dict.fromkeys(labels)),
        row=labels,
        left=[step["begin"] for step in steps],
        length=lengths,
        name=names,
        colour=[colours.get(name, GREY) for name in names],
    )
    return {
        "figures": [figure],
        "colours": colours,
        "all_processes": all_processes,
        "left_out": start["left_out"],
        "steps": steps,
    }


def _gpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """GPUs over time, and a table of their peaks."""
    sizes = [size for worker in record["workers"] for size in worker["device_memory"]]
    charts = [
        Chart("GPU use, %", _of_gpus(record, "gpu"), NUMBER, 100.0),
        Chart("GPU memory in use", _of_gpus(record, "gpu_memory"), BYTES, max(sizes, default=0) or None),
        Chart("allocated by RMM", _of_workers(record, "rmm"), BYTES),
        Chart("spilled from the GPU", _of_workers(record, "gpu_spilled"), BYTES),
        Chart("spilled by cuDF", _of_workers(record, "cudf_spilled"), BYTES),
        Chart("power, W", _of_gpus(record, "gpu_power"), NUMBER),
        Chart("temperature, °C", _of_gpus(record, "gpu_temperature"), NUMBER),
        Chart("PCIe, bytes per second", _of_gpus(record, "gpu_pcie"), BYTES),
        Chart("NVLink, bytes per second", _of_gpus(record, "gpu_nvlink"), BYTES),
    ]
    rows = [_gpu_peaks(record, worker, place) for worker in _workers(record) for place in range(MOST_GPUS)]
    return {"figures": _drawn(charts, record), "peaks": [row for row in rows if row]}


def _gpu_peaks(record: Mapping[str, Any], worker: Mapping[str, Any], place: int) -> list[Any]:
    """The row of one of a worker's GPUs; empty: there are no figures of such a GPU."""
    names = ("gpu", "gpu_memory", "gpu_power", "gpu_temperature")
    use, memory, power, temperature = (worker["peaks"].get(of_gpu(name, place)) for name in names)
    if use is None and memory is None:
        return []
    energy, sizes = worker.get("energy", ()), worker["device_memory"]
    readings = (power, temperature, energy[place] if place < len(energy) else None)
    return [
        _gpu_name(worker["name"], place),
        worker["host"],
        round(use or 0, 1),
        _size(memory or 0),
        _size(sizes[place]) if place < len(sizes) else "-",
        _size(worker["peaks"].get("gpu_spilled")) if place == 0 else "",
        *("-" if value is None else round(value) for value in readings),
        _slowed(record["series"]["workers"].get(worker["name"], {}), place),
    ]


def _slowed(columns: Mapping[str, Any], place: int) -> str:
    """The reasons for which the clocks of one of a worker's GPUs were lowered, with their shares of the points in time."""
    known = slowed_of(columns, place)
    shares = {why: sum(why in reasons for reasons in known) / len(known) for why in SLOWED if known}
    return ", ".join(f"{why} {100 * share:.0f} %" for why, share in shares.items() if share) or "-"


def _memory(record: Mapping[str, Any]) -> dict[str, Any]:
    """Memory and CPU of workers over time, and a table of their peaks."""
    charts = [
        Chart("memory of the worker's process", _of_workers(record, "memory"), BYTES),
        Chart("results that Dask holds (managed memory)", _of_workers(record, "managed"), BYTES),
        Chart("spilled to disk", _of_workers(record, "spilled"), BYTES),
        Chart("CPU, % of a core", _of_workers(record, "cpu"), NUMBER),
    ]
    rows = []
    for worker in _workers(record):
        peaks = worker["peaks"]
        limit = _size(worker["memory_limit"]) if worker["memory_limit"] else "no limit"
        memory, managed = _size(peaks.get("memory", 0)), _size(peaks.get("managed", 0))
        spilled, cpu = _size(peaks.get("spilled")), round(peaks.get("cpu", 0))
        rows.append([worker["name"], worker["host"], memory, limit, managed, spilled, cpu])
    return {"figures": _drawn(charts, record), "peaks": rows}


def _tasks(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The task stream: a row for each thread of a worker."""
    if not tasks["start"]:
        return {"colours": {}}
    names = [tasks["names"][name] for name in tasks["name"]]
    actions = [tasks["actions"][action] for action in tasks["action"]]
    colours = colours_of(
        (name, length)
        for name, action, length in zip(names, actions, tasks["length"], strict=True)
        if action == "compute"
    )
    of_action = {action: ACTION_COLOURS[action] for action in sorted({*actions} - {"compute"})}
    lanes = tasks["lanes"]
    several = {worker for worker, thread in lanes if thread}
    labels = [f"{worker} thread {thread}" if worker in several else worker for worker, thread in lanes]
    order = sorted(range(len(lanes)), key=lambda lane: (natural_sort_key(lanes[lane][0]), lanes[lane][1]))
    figure = bars(
        "task stream",
        [labels[lane] for lane in order],
        row=[labels[lane] for lane in tasks["lane"]],
        left=tasks["start"],
        length=tasks["length"],
        name=[n if a == "compute" else f"{a}: {n}" for n, a in zip(names, actions, strict=True)],
        colour=[of_action.get(a) or colours.get(n, GREY) for n, a in zip(names, actions, strict=True)],
        alpha=[1.0 if action in ("compute", "failed") else 0.4 for action in actions],
    )
    return {"figures": [figure], "colours": colours | of_action}


def _prefixes(prefixes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of the time by prefix of tasks."""
    actions = sorted(
        {action for prefix in prefixes for action in prefix["seconds"]}, key=lambda a: (a != "compute", a)
    )
    rows = []
    for prefix in prefixes[:MOST_ROWS]:
        seconds, tasks = prefix["seconds"], prefix["tasks"]
        mean = round(1e3 * seconds.get("compute", 0.0) / tasks, 3) if tasks else 0
        times = [round(seconds.get(action, 0.0), 3) for action in actions]
        rows.append([prefix["name"], tasks, prefix["failed"], *times, mean, _size(prefix["bytes"])])
    return {"header": [f"{action}, s" for action in actions], "rows": rows}


def _transfers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Data between workers; between nodes as well, if there are several."""
    rows, by = record["transfers"]["rows"], record["transfers"]["by"]
    if not rows:
        return {"most": []}
    by_bytes = any(row["bytes"] for row in rows)
    value, form, what = ("bytes", BYTES, "bytes") if by_bytes else ("count", NUMBER, "number of transfers")
    cells = {(row["from"], row["to"]): row[value] for row in rows}
    figures = [matrix(f"{what}, by {by}", cells, form)]
    host = {worker["name"]: worker["host"] for worker in record["workers"]}
    if by == "worker" and len(set(host.values())) > 1:
        folded: Counter[tuple[str, str]] = Counter()
        for (sender, receiver), number in cells.items():
            folded[host.get(sender, "unknown"), host.get(receiver, "unknown")] += number
        figures.insert(0, matrix(f"{what}, by node", folded, form))
    return {
        "figures": figures,
        "number": sum(row["count"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows) if by_bytes else None,
        "most": [
            [
                row["from"],
                row["to"],
                row["count"],
                _size(row["bytes"]) if by_bytes else "-",
                round(row["seconds"], 3),
                _size(row["bytes"] / row["seconds"]) if by_bytes and row["seconds"] else "-",
            ]
            for row in sorted(rows, key=lambda row: -row[value])[:MOST_PAIRS]
        ],
    }


def _events(record: Mapping[str, Any]) -> dict[str, Any]:
    """Arrivals, deaths and restarts of workers."""
    rows: list[list[Any]] = [
        [round(event["at"], 1), *(event[key] for key in ("what", "worker", "why", "output"))]
        for event in record["events"]
    ]
    return {
        "deaths": sum(row[1] == "process died" for row in rows),
        "again": sum(worker["starts"] > 1 for worker in record["workers"]),
        "started": [row[0] for row in rows if row[1] == "worker started"],
        "rows": [row for row in rows if row[1] != "worker started"],
    }


class Chart(NamedTuple):
    """A quantity over time."""

    title: str
    #: By worker, or by GPU.
    rows: Mapping[str, Sequence[float | None]]
    #: Of the numbers, `BYTES` or `NUMBER`.
    form: str
    #: The end of the scale; None: the largest value.
    high: float | None = None


def _drawn(charts: Iterable[Chart], record: Mapping[str, Any]) -> list[Any]:
    """A figure for each chart that has values; without an end of the scale, values other than 0."""
    times = record["series"]["times"]
    return [
        over_time(chart.title, times, chart.rows, chart.form, chart.high)
        for chart in charts
        if chart.rows and (chart.high is not None or any(any(row) for row in chart.rows.values()))
    ]


def _of_workers(record: Mapping[str, Any], quantity: str) -> dict[str, Sequence[float | None]]:
    """A row for each worker that reports this quantity."""
    found = {name: columns.get(quantity) or () for name, columns in record["series"]["workers"].items()}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _of_gpus(record: Mapping[str, Any], quantity: str) -> dict[str, Sequence[float | None]]:
    """A row for each GPU; a worker's second GPU and those after it have their number in the name."""
    return {
        _gpu_name(worker, place): values
        for place in range(MOST_GPUS)
        for worker, values in _of_workers(record, of_gpu(quantity, place)).items()
    }


def _gpu_name(worker: str, place: int) -> str:
    return worker if place == 0 else f"{worker} GPU {place + 1}"


def _workers(record: Mapping[str, Any]) -> list[Any]:
    """The workers for the tables, in the order of their names."""
    return sorted(record["workers"], key=lambda worker: natural_sort_key(worker["name"]))[:MOST_ROWS]


def _linked(text: str) -> Markup:
    """A line of advice, in which the name of a page of the documentation is a link, if the package has its address."""
    address = documentation()
    escaped = str(escape(text))
    if address:
        escaped = re.sub(
            r"\bdocs/([\w-]+)\.md\b", rf'<a href="{escape(address)}/\1.html">docs/\1.md</a>', escaped
        )
    return Markup(escaped)


def _size(number: float | None) -> str:
    """Bytes, or "-" if they are not known."""
    return "-" if number is None else format_bytes(int(number)) if number else "0"


def _value(value: Any) -> str:
    """The value of an option."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


# The figures: lines or a heat map over time, bars, and a matrix. Axes and texts have a grey that is legible on light and on dark
# pages; backgrounds are the page's.

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
    names = sorted(rows, key=natural_sort_key)
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
    names = sorted({name for pair in cells for name in pair}, key=natural_sort_key)
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
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = models.FixedTicker(ticks=list(columns)), columns
    plot.xaxis.major_label_orientation = 0.9 if size > 8 else 0
    plot.xgrid.grid_line_color = None
    return plot


def bars(
    title: str,
    rows: Sequence[str],
    *,
    row: Sequence[str],
    left: Sequence[float],
    length: Sequence[float],
    name: Sequence[str],
    colour: Sequence[str],
    alpha: Sequence[float] | float = 1.0,
) -> Any:
    """Bars, each in one of the rows, of which the first is at the top."""
    place = {each: number for number, each in enumerate(rows)}
    begins, lengths = np.array(left, dtype=float), np.array(length, dtype=float)
    source = models.ColumnDataSource(
        {
            "y": (len(rows) - np.array([place[each] for each in row]) - 0.5).astype("float32"),
            "left": begins,
            "right": begins + lengths,
            "seconds": lengths.astype("float32"),
            "row": list(row),
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
    plot.add_tools(models.HoverTool(tooltips=[("", "@row"), ("", "@name"), ("took", "@seconds{0.000} s")]))
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
    """A line for each worker, in the colour that the legend has for it."""
    plot = _figure(title, 260, y_range=(0, high * 1.05))
    plot.yaxis.ticker, plot.yaxis.formatter = _ticker(form), models.NumeralTickFormatter(format=form)
    for colour, (name, values) in zip(Category10[10], rows.items(), strict=False):
        columns = {"x": np.array(times), "y": values.astype("float32"), "name": [name] * len(times)}
        source = models.ColumnDataSource(columns)
        plot.line("x", "y", source=source, color=colour, line_width=1.8, legend_label=f"worker {name}")
        plot.scatter("x", "y", source=source, color=colour, size=3)  # a line of one point is not drawn
    plot.add_tools(
        models.HoverTool(tooltips=[("worker", "@name"), ("at", "@x{0.0} s"), ("value", f"@y{{{form}}}")])
    )
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
    mapper = models.LinearColorMapper(palette=Viridis256, low=0, high=high, nan_color="rgba(0, 0, 0, 0)")
    image = values[::-1].astype("float32")
    plot.image(image=[image], y=0, dh=len(names), color_mapper=mapper, level="image", **place)
    _label_rows(plot, names)
    hover = {"names": list(names)}
    formatters = {
        "$x": models.CustomJSHover(args=hover, code="return names[Math.floor(special_vars.x)] ?? ''"),
        "$y": models.CustomJSHover(
            args=hover, code="return names[names.length - 1 - Math.floor(special_vars.y)] ?? ''"
        ),
    }
    plot.add_tools(models.HoverTool(tooltips=[*tips, ("", f"@image{{{form}}}")], formatters=formatters))
    bar = models.ColorBar(
        color_mapper=mapper,
        ticker=_ticker(form),
        formatter=models.NumeralTickFormatter(format=form),
        background_fill_alpha=0,
        major_label_text_color=GREY,
        width=10,
        padding=4,
    )
    plot.add_layout(bar, "right")


def _figure(title: str, height: int, x_label: str = SECONDS, **more: Any) -> Any:
    """An empty figure in the colours of the page."""
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
    """Pixels for so many rows: fewer for each, the more there are."""
    return min(1200, 110 + max(14, min(28, 600 // max(1, rows))) * rows)


def _label_rows(plot: Any, names: Sequence[str]) -> None:
    """Write the names of rows, of which the first is at the top, at the vertical axis."""
    labels = {len(names) - number - 0.5: name for number, name in _labelled(names)}
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = models.FixedTicker(ticks=list(labels)), labels
    plot.ygrid.grid_line_color = None


def _labelled(names: Sequence[str]) -> list[tuple[int, str]]:
    """The rows that have a label: of very many some."""
    every = max(1, math.ceil(len(names) / MOST_LABELS))
    return [(number, name) for number, name in enumerate(names) if number % every == 0]


def _ticker(form: str) -> models.AdaptiveTicker:
    """Round numbers, also of bytes."""
    if form == BYTES:
        return models.AdaptiveTicker(
            base=1024, mantissas=[2**power for power in range(10)], num_minor_ticks=0
        )
    return models.AdaptiveTicker(num_minor_ticks=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a page of a JSON file."""
    parser = argparse.ArgumentParser("python -m dask_gpu_mpi.view.report_page", description=main.__doc__)
    parser.add_argument("source", metavar="FILE.json", type=Path)
    parser.add_argument("target", metavar="FILE.html", type=Path)
    given = parser.parse_args(arguments)
    try:
        replace(given.target, page(json.loads(given.source.read_text("utf-8"))).encode())
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:  # not JSON, or other data
        parser.error(f"{given.source} can't be read as a report: {one_line(error)}")


if __name__ == "__main__":
    main()
