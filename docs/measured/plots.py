"""The plots of docs/performance.md: their data, the data in words, and the drawing, which needs matplotlib.

An SVG carries the hash of its data, so that one can see without matplotlib whether it is current.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measured.results import OURS, ROOT, known, load

Data = dict[str, Any]
#: Colours that differ for all kinds of colour vision (Okabe and Ito); each has one meaning in all plots.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#6e6e6e"
#: Parts of one bar, from the first to the last.
SHADES = ("#9ecae1", "#3182bd", "#08306b")
#: Names of the parts, and their places in shares of the axis, panel by panel.
PHASES = (
    (("launcher, MPI_Init", 0.0), ("imports", 0.19), ("plan, scheduler, workers", 0.28)),
    (("launcher, MPI_Init, imports, one CUDA context", 0.0), ("another context, scheduler, workers", 0.39)),
)
SETTINGS = {
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    # legible on a dark page, too
    "figure.facecolor": "white",
}


def phases() -> Data:
    """Seconds until ready, by phase, and the totals of other programs."""

    def group(name: str, shape: str, programs: Sequence[str], peer: str) -> Data:
        ready = {way: row["ready_s"] for way, row in load(name)["results"][shape].items()}
        ends = [0.0, *(ready[way] for way in programs), ready[OURS]]
        return {
            "parts": [end - begin for begin, end in itertools.pairwise(ends)],
            "others": {way: ready[way] for way in ("dask-mpi", peer)},
        }

    cpu = ("empty MPI", "limit")
    gpu = group("startup-2xH100", "1x2", ("limit, quick MPI",), "LocalCUDACluster")
    return {
        "CPU workers: 2 cores, MPICH": {
            "1 rank × 1 worker": group("startup-mpich", "1x1", cpu, "LocalCluster"),
            "1 rank × 4 workers": group("startup-mpich", "1x4", cpu, "LocalCluster"),
            "4 ranks × 1 worker": group("startup-mpich", "4x1", cpu, "LocalCluster"),
        },
        "GPU workers: Open MPI": {"1 rank × 2 workers\non 2×H100": gpu},
    }


def say_phases(data: Data) -> str:
    """The bars in words."""
    sentences = []
    for title, groups in data.items():
        bars = []
        for shape, group in groups.items():
            found = {"dask-gpu-mpi": sum(group["parts"]), **group["others"]}
            seconds = ", ".join(f"{way} {figure:.2f} s" for way, figure in found.items())
            bars.append(f"{' '.join(shape.split())}: {seconds}")
        sentences.append(f"{title}, {'; '.join(bars)}.")
    return " ".join(sentences)


def draw_phases(pyplot: Any, data: Data) -> Any:
    """Bars in parts, one group for each shape, one panel for each kind of worker."""
    heights = [3.8 * len(panel) + 1.4 for panel in data.values()]
    figure, axes = pyplot.subplots(2, 1, figsize=(8.2, 6.2), sharex=True, height_ratios=heights)
    groups = [group for panel in data.values() for group in panel.values()]
    limit = 1.3 * max(seconds for group in groups for seconds in group["others"].values())
    for axis, (title, panel), names, height in zip(axes, data.items(), PHASES, heights, strict=True):
        for row, group in enumerate(panel.values()):
            top, left = row * 3.8, 0.0
            colours = SHADES[-len(names) :]
            for part, colour, (text, place) in zip(group["parts"], colours, names, strict=True):
                axis.barh(top, part, 0.9, left=left, color=colour, edgecolor="white")
                if row == 0:
                    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8}
                    below = (left + part / 2, top - 0.4)
                    axis.annotate(text, below, (place * limit, top - 1.5), fontsize=8, arrowprops=line)
                left += part
            text = f"{left:.2f} s  dask-gpu-mpi"
            axis.text(left + limit / 130, top, text, va="center", color=BLUE, weight="bold")
            peers = zip(group["others"].items(), (ORANGE, GREEN), strict=True)
            for (way, seconds), colour in peers:
                top += 1
                axis.barh(top, seconds, 0.9, color=colour)
                axis.text(seconds + limit / 130, top, f"{seconds:.2f} s  {way}", va="center", color=colour)
        axis.set_yticks([row * 3.8 + 1 for row in range(len(panel))], list(panel))
        axis.tick_params(left=False)
        axis.set_ylim(height - 1.8, -2.2)
        axis.set_title(title, loc="left")
        axis.set_xlim(0, limit)
        axis.spines["left"].set_visible(False)
    axes[0].tick_params(bottom=False)
    axes[0].spines["bottom"].set_visible(False)
    axes[-1].set_xlabel("seconds from the launch until the client sees all workers")
    return figure


def streams() -> Data:
    """GB/s of GPU memory between two nodes, one way, by way."""
    trials = load("between-nodes-2xH200")["trials"]
    return {known(way): median(each["one way, GB/s"] for each in rounds) for way, rounds in trials.items()}


def say_streams(data: Data) -> str:
    """The bars in words."""
    return ", ".join(f"{way}: {speed:.2f} GB/s" for way, speed in data.items()) + "."


def draw_streams(pyplot: Any, data: Data) -> Any:
    """A bar for each way."""
    figure, axis = pyplot.subplots(figsize=(8.2, 2.2))
    ways = sorted(data, key=lambda way: data[way])
    for row, way in enumerate(ways):
        ours = way.startswith("dask-gpu-mpi") and "before" not in way
        axis.barh(row, data[way], 0.7, color=BLUE if ours else ORANGE if "dask cuda" in way else GREY)
        axis.text(data[way] + 0.1, row, f"{data[way]:.2f} GB/s", va="center")
    axis.set_yticks(range(len(ways)), ways)
    axis.tick_params(left=False)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(0, 1.15 * max(data.values()))
    axis.set_xlabel("GB/s of GPU memory, one way")
    return figure


class Plot(NamedTuple):
    """A picture: its data, the same in words for those who do not see it, and the function that draws it."""

    title: str
    data: Callable[[], Data]
    say: Callable[[Data], str]
    draw: Callable[[Any, Data], Any]


#: By the name of the file, docs/images/perf-NAME.svg.
PLOTS = {
    "startup": Plot("Start-up by phase", phases, say_phases, draw_phases),
    "between": Plot("GPU memory between two nodes", streams, say_streams, draw_streams),
}


def picture(name: str) -> Path:
    """The file of a plot."""
    return ROOT / "docs" / "images" / f"perf-{name}.svg"


def rounded(data: Any) -> Any:
    """As exact as a plot can show, so that the hash is the same on every machine."""
    if isinstance(data, dict):
        return {key: rounded(each) for key, each in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(each) for each in data]
    return round(data, 4)


def text(name: str) -> str:
    """A plot in Markdown."""
    plot = PLOTS[name]
    return f"![{plot.title}. {plot.say(rounded(plot.data()))}](images/{picture(name).name})\n"


def digest(name: str) -> str:
    """The hash of a plot's data."""
    plot = PLOTS[name]
    content = json.dumps([plot.title, rounded(plot.data())], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def is_current(name: str) -> bool:
    """Whether the file shows today's data."""
    file = picture(name)
    return file.is_file() and f"data:{digest(name)}" in file.read_text(encoding="utf-8")


def write(name: str) -> None:
    """Draw a plot; ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plot, file = PLOTS[name], picture(name)
    with pyplot.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = plot.draw(pyplot, rounded(plot.data()))
        figure.suptitle(plot.title, x=0.01, ha="left", weight="bold", fontsize=12)
        metadata = {"Date": None, "Creator": None, "Title": plot.title, "Identifier": f"data:{digest(name)}"}
        figure.savefig(file, metadata=metadata)
        pyplot.close(figure)
    # matplotlib leaves spaces at the ends of lines
    drawn = re.sub(r"[ \t]+$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    file.write_text(drawn, encoding="utf-8")
