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
from typing import Any, NamedTuple

from measured.results import OURS, ROOT, interval, known, load, rates

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
        for shape, group in groups.items():
            found = {"dask-gpu-mpi": sum(group["parts"]), **group["others"]}
            seconds = ", ".join(f"{way} {figure:.2f} s" for way, figure in found.items())
            sentences.append(f"{title}, {' '.join(shape.split())}: {seconds}.")
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


def ranks() -> Data:
    """Seconds until ready of jobs of many ranks, and of ranks that only import."""
    rows = load("scale-real-32-cores")["real"]
    return {
        "ranks": [row["ranks"] for row in rows],
        "ready": [row["ready_s"] for row in rows],
        "trials": [[run["ready_s"] for run in row["runs"]] for row in rows],
        "imports": [row["limit_s"] for row in rows],
    }


def say_ranks(data: Data) -> str:
    """The right ends of the lines in words."""
    return (
        f"With {data['ranks'][-1]} ranks on 32 cores a cluster is ready after {data['ready'][-1]:.1f} s, "
        f"ranks that only import after {data['imports'][-1]:.1f} s."
    )


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


def transfers() -> Data:
    """GB/s between GPU workers: medians, and the intervals of the means of the trials."""

    def panel(name: str) -> Data:
        run = load(name)["runs"][0]
        return {
            known(way): {"median": run["median_GB_s"][way], "interval": interval(rates(run, way)) or ()}
            for way in run["seconds"]
        }

    return {
        "(x + x.T).sum() of an array of 12.8 GB": panel("transfer-2xH100"),
        "an array of 12.8 GB from rows to columns": panel("transfer-all-to-all-2xH100"),
    }


def say_transfers(data: Data) -> str:
    """The medians in words."""
    sentences = []
    for title, found in data.items():
        medians = "; ".join(f"{way}: {figures['median']:.3g}" for way, figures in found.items())
        sentences.append(f"{title}, GB/s: {medians}.")
    return " ".join(sentences)


def draw_transfers(pyplot: Any, data: Data) -> Any:
    """Bars from zero, with the interval as a line, one panel for each operation."""
    heights = [len(panel) for panel in data.values()]
    figure, axes = pyplot.subplots(2, 1, figsize=(8.2, 3.6), sharex=True, height_ratios=heights)
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
    axes[0].tick_params(bottom=False)
    axes[0].spines["bottom"].set_visible(False)
    axes[-1].set_xlabel("GB per second")
    return figure


def memory() -> Data:
    """Memory of a ready cluster of one rank, against its workers."""

    def panel(name: str, counts: Sequence[int], peer: str) -> Data:
        results = {count: load(name)["results"][f"1x{count}"] for count in counts}
        return {
            known(way): [[count, found[way]["pss_total"]] for count, found in results.items()]
            for way in (OURS, "dask-mpi", peer)
        }

    return {
        "CPU workers, 2 cores": panel("startup-openmpi", (1, 2, 4), "LocalCluster"),
        "GPU workers, 2×H100": panel("startup-2xH100", (1, 2), "LocalCUDACluster"),
    }


def say_memory(data: Data) -> str:
    """The ends of the lines in words."""
    sentences = []
    for title, lines in data.items():
        ends = ", ".join(f"{way} {line[0][1]:.0f} to {line[-1][1]:.0f}" for way, line in lines.items())
        workers = next(iter(lines.values()))[-1][0]
        sentences.append(f"{title}, MiB with one worker and with {workers}: {ends}.")
    return " ".join(sentences)


def draw_memory(pyplot: Any, data: Data) -> Any:
    """Lines with their names at the right end, one panel for each kind of worker."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8.2, 4.2), sharey=True)
    for axis, (title, lines) in zip(axes, data.items(), strict=True):
        styles = zip(lines.values(), (BLUE, ORANGE, GREEN), ("o", "s", "^"), strict=True)
        for points, colour, marker in styles:
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, linewidth=2)
        ends = spread([points[-1][1] for points in lines.values()], 55)
        for (way, points), place, colour in zip(lines.items(), ends, (BLUE, ORANGE, GREEN), strict=True):
            workers, size = points[-1]
            axis.text(workers + 0.15, place, f"{way}: {size:.0f}", color=colour, va="center")
        axis.set_xticks([workers for workers, _ in points])
        axis.set_xlim(0.7, 6.9)
        axis.set_ylim(0, 1350)
        axis.grid(axis="y", color="#e0e0e0")
        axis.set_title(title, loc="left")
        axis.set_xlabel("workers of one rank")
    axes[0].set_ylabel("memory of all processes, MiB (PSS)")
    return figure


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places for labels that are at least so far apart, in the order of the labels."""
    found = list(places)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for lower, upper in itertools.pairwise(order):
        found[upper] = max(found[upper], found[lower] + gap)
    return found


class Plot(NamedTuple):
    """A picture: its data, the same in words for those who do not see it, and the function that draws it."""

    title: str
    data: Callable[[], Data]
    say: Callable[[Data], str]
    draw: Callable[[Any, Data], Any]


#: By the name of the file, docs/images/perf-NAME.svg.
PLOTS = {
    "startup": Plot("Start-up by phase", phases, say_phases, draw_phases),
    "ranks": Plot(
        "Time until a cluster is ready, against the ranks of one node", ranks, say_ranks, draw_ranks
    ),
    "transfers": Plot("Transfers between two GPU workers, 2×H100", transfers, say_transfers, draw_transfers),
    "memory": Plot("Memory of a ready cluster, against its workers", memory, say_memory, draw_memory),
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
