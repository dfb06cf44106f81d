"""The plots of docs/performance.md: how they are drawn, and whether they are current; drawing needs matplotlib.

An SVG carries the hash of its data, so that one can see without matplotlib whether it is current.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import plot_data
from measured.plot_data import Data
from measured.results import ROOT

IMAGES = ROOT / "docs" / "images"
#: Colours that differ for all kinds of colour vision (Okabe and Ito); they have the same meaning in every plot.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#6e6e6e"
#: Parts of one bar, from the first to the last.
SHADES = ("#9ecae1", "#3182bd", "#08306b")


@dataclass(frozen=True)
class Plot:
    """One picture."""

    #: Its file is docs/images/perf-NAME.svg.
    name: str
    title: str
    #: What it shows, as plain data.
    data: Callable[[], Data]
    #: Draws the data with the module pyplot and returns the figure.
    draw: Callable[[Any, Data], Any]
    #: What the data say, for those who do not see the picture.
    alt: Callable[[Data], str]
    #: How to read it.
    note: str

    @property
    def file(self) -> Path:
        """Where it is."""
        return IMAGES / f"perf-{self.name}.svg"

    def text(self) -> str:
        """The picture and its note, in Markdown."""
        return f"![{self.title}. {self.alt(self.data())}](images/{self.file.name})\n\n{self.note}\n"

    def digest(self) -> str:
        """The hash of its data."""
        text = json.dumps([self.title, self.data()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def is_current(self) -> bool:
        """Whether the file shows today's data."""
        return self.file.is_file() and f"data:{self.digest()}" in self.file.read_text(encoding="utf-8")


#: Names of the parts, and where they stand in shares of the axis, panel by panel.
PHASES = (
    (("launcher, MPI_Init", 0.0), ("imports", 0.19), ("plan, scheduler, workers", 0.28)),
    (
        ("launcher, MPI_Init, imports, one CUDA context", 0.0),
        ("another context, scheduler, workers", 0.39),
    ),
)


def draw_phases(pyplot: Any, data: Data) -> Any:
    """Bars in parts, one group for each shape, one panel for each kind of worker."""
    heights = [3.8 * len(panel) + 1.4 for panel in data.values()]
    figure, axes = pyplot.subplots(2, 1, figsize=(8.2, 6.2), sharex=True, height_ratios=heights)
    longest = max(
        seconds
        for groups in data.values()
        for group in groups.values()
        for seconds in group["others"].values()
    )
    limit = 1.3 * longest
    for axis, (title, groups), names, height in zip(axes, data.items(), PHASES, heights, strict=True):
        colours = SHADES[-len(names) :]
        for row, group in enumerate(groups.values()):
            top, left = row * 3.8, 0.0
            for part, colour, (text, place) in zip(group["parts"], colours, names, strict=True):
                axis.barh(top, part, 0.9, left=left, color=colour, edgecolor="white")
                if row == 0:
                    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8}
                    below = (left + part / 2, top - 0.4)
                    axis.annotate(text, below, (place * limit, top - 1.5), fontsize=8, arrowprops=line)
                left += part
            axis.text(
                left + limit / 130, top, f"{left:.2f} s  dask-gpu-mpi", va="center", color=BLUE, weight="bold"
            )
            peers = zip(group["others"].items(), (ORANGE, GREEN), strict=True)
            for step, ((way, seconds), colour) in enumerate(peers, 1):
                axis.barh(top + step, seconds, 0.9, color=colour)
                axis.text(
                    seconds + limit / 130, top + step, f"{seconds:.2f} s  {way}", va="center", color=colour
                )
        axis.set_yticks([row * 3.8 + 1 for row in range(len(groups))], list(groups))
        axis.tick_params(left=False)
        axis.set_ylim(height - 1.8, -2.2)
        axis.set_title(title, loc="left")
        axis.set_xlim(0, limit)
        axis.spines["left"].set_visible(False)
    axes[0].tick_params(bottom=False)
    axes[0].spines["bottom"].set_visible(False)
    axes[-1].set_xlabel("seconds from the launch until the client sees all workers")
    return figure


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places for labels that are at least so far apart, in the order of the labels."""
    found = list(places)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for lower, upper in itertools.pairwise(order):
        found[upper] = max(found[upper], found[lower] + gap)
    return found


def draw_ranks(pyplot: Any, data: Data) -> Any:
    """Two lines, with their names at the right end."""
    figure, axis = pyplot.subplots(figsize=(8.2, 4.2))
    counts = data["ranks"]
    axis.plot(counts, data["ready"], color=BLUE, linewidth=2)
    for count, trials in zip(counts, data["trials"], strict=True):
        axis.plot([count] * len(trials), trials, "o", color=BLUE, markersize=5)
    axis.plot(counts, data["imports"], color=GREY, linewidth=1.2, linestyle="--")
    axis.text(counts[-1] * 1.03, data["ready"][-1], "cluster ready", color=BLUE, va="center")
    axis.text(counts[-1] * 1.03, data["imports"][-1], "ranks that only import", color=GREY, va="center")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlim(8, max(counts) * 1.6)
    axis.set_ylim(0, 1.15 * max(data["ready"]))
    axis.set_xlabel("MPI ranks on one node, one CPU worker each")
    axis.set_ylabel("seconds after the launch")
    axis.grid(axis="y", color="#e0e0e0")
    return figure


def draw_throughput(pyplot: Any, data: Data) -> Any:
    """Bars from zero, with the interval as a line, one panel for each operation."""
    figure, axes = pyplot.subplots(
        2, 1, figsize=(8.2, 3.6), sharex=True, height_ratios=[len(panel) for panel in data.values()]
    )
    for axis, (title, found) in zip(axes, data.items(), strict=True):
        for row, (way, figures) in enumerate(found.items()):
            median, bounds = figures["median"], figures["interval"]
            axis.barh(row, median, 0.7, color=GREEN if "LocalCUDA" in way else BLUE)
            text = f"{median:.3g}"
            if bounds:
                axis.plot(bounds, [row, row], "|-", color="black", markersize=9)
                text += f"  (95 % interval {bounds[0]:.3g} to {bounds[1]:.3g})"
            axis.text(max([median, *bounds]) + 3, row, text, va="center")
        axis.set_yticks(range(len(found)), list(found))
        axis.tick_params(left=False)
        axis.invert_yaxis()
        axis.set_title(title, loc="left")
        axis.set_xlim(0, 420)
    for axis in axes[:-1]:
        axis.tick_params(bottom=False)
        axis.spines["bottom"].set_visible(False)
    axes[-1].set_xlabel("GB per second")
    return figure


def draw_memory(pyplot: Any, data: Data) -> Any:
    """Lines with their names at the right end, one panel for each kind of worker."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8.2, 4.2), sharey=True)
    for axis, (title, lines) in zip(axes, data.items(), strict=True):
        styles = zip(lines.values(), (BLUE, ORANGE, GREEN), ("o", "s", "^"), strict=True)
        for points, colour, marker in styles:
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, linewidth=2)
        ends = spread([points[-1][1] for points in lines.values()], 55)
        for way, place, colour in zip(lines, ends, (BLUE, ORANGE, GREEN), strict=True):
            axis.text(
                points[-1][0] + 0.15, place, f"{way}: {lines[way][-1][1]:.0f}", color=colour, va="center"
            )
        axis.set_xticks([workers for workers, _ in points])
        axis.set_xlim(0.7, 6.9)
        axis.set_ylim(0, 1350)
        axis.grid(axis="y", color="#e0e0e0")
        axis.set_title(title, loc="left")
        axis.set_xlabel("workers of one rank")
    axes[0].set_ylabel("memory of all processes, MiB (PSS)")
    return figure


PLOTS = (
    Plot(
        "startup",
        "Start-up by phase",
        plot_data.phases,
        draw_phases,
        plot_data.say_phases,
        "A phase is the difference between one program and the next. The first is an MPI program that does nothing. The second\n"
        "imports the modules of an agent, and makes one CUDA context on a GPU. The third is the whole cluster.",
    ),
    Plot(
        "ranks",
        "Time until a cluster is ready, against the ranks of one node",
        plot_data.ranks,
        draw_ranks,
        plot_data.say_ranks,
        "Each point is a trial. Each rank imports for itself and for its agent, so the cores limit the start.",
    ),
    Plot(
        "transfers",
        "Transfers between two GPU workers, 2×H100",
        plot_data.throughput,
        draw_throughput,
        plot_data.say_throughput,
        "Bars are medians, lines 95 % intervals of the mean of the trials. A bar without a line is a single trial.",
    ),
    Plot(
        "memory",
        "Memory of a ready cluster, against its workers",
        plot_data.memory,
        draw_memory,
        plot_data.say_memory,
        "The workers of a rank share the pages of Dask, so another CPU worker takes 14 MiB. A GPU worker takes 122 MiB,\n"
        "most of which are CUDA's own.",
    ),
)


def text() -> str:
    """All plots, in Markdown."""
    return "\n".join(plot.text() for plot in PLOTS)


def write(plot: Plot) -> None:
    """Draw one plot; ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.hashsalt": plot.name,
        "svg.fonttype": "none",
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.use": True,
        # a card of its own: legible on a dark page, too
        "figure.facecolor": "white",
    }
    with pyplot.rc_context(settings):
        figure = plot.draw(pyplot, plot.data())
        figure.suptitle(plot.title, x=0.01, ha="left", weight="bold", fontsize=12)
        metadata = {"Date": None, "Creator": None, "Title": plot.title, "Identifier": f"data:{plot.digest()}"}
        figure.savefig(plot.file, metadata=metadata)
        pyplot.close(figure)
    # matplotlib leaves spaces at the ends of lines
    drawn = plot.file.read_text(encoding="utf-8")
    plot.file.write_text(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE), encoding="utf-8")
