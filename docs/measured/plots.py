"""The plots of docs/performance.md: what each shows, as plain data, and how it is drawn (needs matplotlib).

An SVG carries the hash of its data, so that one can see without matplotlib whether it is current.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured.results import OURS, ROOT, interval, known, load, rates, value

IMAGES = ROOT / "docs" / "images"
#: Colours that differ for all kinds of colour vision (Okabe and Ito); they have the same meaning in every plot.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#6e6e6e"
#: Parts of one bar, from the first to the last.
SHADES = ("#9ecae1", "#3182bd", "#08306b")
Data = dict[str, Any]


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

    @property
    def file(self) -> Path:
        """Where it is."""
        return IMAGES / f"perf-{self.name}.svg"

    def digest(self) -> str:
        """The hash of its data."""
        text = json.dumps([self.title, self.data()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def is_current(self) -> bool:
        """Whether the file shows today's data."""
        return self.file.is_file() and f"data:{self.digest()}" in self.file.read_text(encoding="utf-8")


def rounded(figure: float) -> float:
    """As exact as a plot can show, so that the hash is the same on every machine."""
    return round(float(figure), 4)


def phases() -> Data:
    """Seconds until ready, by phase, beside what other programs take in total."""

    def ready(name: str, shape: str, way: str) -> float:
        return value(name, "results", shape, way, "ready_s")

    def group(name: str, shape: str, cuts: tuple[str, ...], peer: str) -> Data:
        ends = [ready(name, shape, way) for way in (*cuts, OURS)]
        parts = [rounded(end - begin) for begin, end in zip([0.0, *ends], ends, strict=False)]
        others = {known(way): rounded(ready(name, shape, way)) for way in ("dask-mpi", peer)}
        return {"parts": parts, "others": others}

    cpu = ("empty MPI", "limit")
    return {
        "CPU workers: 2 cores, MPICH": {
            "1 rank × 1 worker": group("startup-mpich", "1x1", cpu, "LocalCluster"),
            "1 rank × 4 workers": group("startup-mpich", "1x4", cpu, "LocalCluster"),
            "4 ranks × 1 worker": group("startup-mpich", "4x1", cpu, "LocalCluster"),
        },
        "GPU workers: Open MPI": {
            "1 rank × 4 workers\non 4×H200": group(
                "startup-4xH200", "1x4", ("limit, quick MPI",), "LocalCUDACluster"
            ),
        },
    }


#: Names of the parts, and where they stand in seconds, panel by panel.
PHASES = (
    (("launcher, MPI_Init", 0.0), ("imports", 1.25), ("plan, scheduler, workers", 1.85)),
    (
        ("launcher, MPI_Init, imports, one CUDA context", 0.0),
        ("three more contexts, scheduler, workers", 3.05),
    ),
)


def draw_phases(pyplot: Any, data: Data) -> Any:
    """Bars in parts, one group for each shape, one panel for each kind of worker."""
    heights = [3.8 * len(panel) + 1.4 for panel in data.values()]
    figure, axes = pyplot.subplots(2, 1, figsize=(8.2, 6.2), sharex=True, height_ratios=heights)
    for axis, (title, groups), names, height in zip(axes, data.items(), PHASES, heights, strict=True):
        colours = SHADES[-len(names) :]
        for row, group in enumerate(groups.values()):
            top, left = row * 3.8, 0.0
            for part, colour, (text, place) in zip(group["parts"], colours, names, strict=True):
                axis.barh(top, part, 0.9, left=left, color=colour, edgecolor="white")
                if row == 0:
                    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8}
                    below = (left + part / 2, top - 0.4)
                    axis.annotate(text, below, (place, top - 1.5), fontsize=8, arrowprops=line)
                left += part
            axis.text(left + 0.05, top, f"{left:.2f} s  dask-gpu-mpi", va="center", color=BLUE, weight="bold")
            peers = zip(group["others"].items(), (ORANGE, GREEN), strict=True)
            for step, ((way, seconds), colour) in enumerate(peers, 1):
                axis.barh(top + step, seconds, 0.9, color=colour)
                axis.text(seconds + 0.05, top + step, f"{seconds:.2f} s  {way}", va="center", color=colour)
        axis.set_yticks([row * 3.8 + 1 for row in range(len(groups))], list(groups))
        axis.tick_params(left=False)
        axis.set_ylim(height - 1.8, -2.2)
        axis.set_title(title, loc="left")
        axis.set_xlim(0, 6.6)
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


def ranks() -> Data:
    """Seconds until ready of jobs of many ranks, and of ranks that only import."""
    found = {}
    for cores in (32, 64):
        rows = load(f"scale-real-{cores}-cores")["real"]
        found[f"{cores} cores"] = {
            "ranks": [row["ranks"] for row in rows],
            "ready": [rounded(row["ready_s"]) for row in rows],
            "trials": [[rounded(run["ready_s"]) for run in row["runs"]] for row in rows],
            "imports": [rounded(row["limit_s"]) for row in rows],
        }
    return found


def draw_ranks(pyplot: Any, data: Data) -> Any:
    """Two lines for each machine, with their names at the right end."""
    figure, axis = pyplot.subplots(figsize=(8.2, 4.2))
    labels = []
    for (machine, found), colour, marker in zip(data.items(), SHADES[1:], ("s", "o"), strict=True):
        axis.plot(found["ranks"], found["ready"], color=colour, linewidth=2)
        for count, trials in zip(found["ranks"], found["trials"], strict=True):
            axis.plot([count] * len(trials), trials, marker, color=colour, markersize=5)
        axis.plot(found["ranks"], found["imports"], color=colour, linewidth=1.2, linestyle="--")
        labels.append((found["ready"][-1], f"{machine}: cluster ready", colour))
        labels.append((found["imports"][-1], f"{machine}: ranks that only import (dashed)", colour))
    counts = next(iter(data.values()))["ranks"]
    for place, (_, text, colour) in zip(spread([end for end, *_ in labels], 0.35), labels, strict=True):
        axis.text(counts[-1] * 1.03, place, text, color=colour, va="center")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlim(8, max(counts) * 1.6)
    axis.set_ylim(0, 7.5)
    axis.set_xlabel("MPI ranks on one node, one CPU worker each")
    axis.set_ylabel("seconds after the launch")
    axis.grid(axis="y", color="#e0e0e0")
    return figure


def throughput() -> Data:
    """GB/s between GPU workers: medians, and the intervals of the means of the trials."""
    comms = load("comms-1xH100")["results"]["1000000000"]
    one_gpu = {
        known(way): [comms["gb_per_s"][way], comms["trials"][way]]
        for way in ("TLS and UCX", "UCX, open", "TLS")
    }
    pair, protocols = load("transfer-4xH200")["runs"][0], load("transfer-4xH200")["runs"][2]
    four_gpus = {
        known(way): [run["median_GB_s"][way], rates(run, way)]
        for run, way in (
            (pair, "ours, UCX"),
            (pair, "LocalCUDACluster, UCX"),
            (protocols, "ours, TCP"),
            (protocols, "ours, TLS"),
        )
    }

    def panel(found: Mapping[str, list[Any]]) -> Data:
        return {
            way: {"median": rounded(median), "interval": [rounded(end) for end in interval(trials) or ()]}
            for way, (median, trials) in found.items()
        }

    return {
        "1×H100: an array of 1 GB from one process to another": panel(one_gpu),
        "4×H200: (x + x.T).sum() of an array of 12.8 GB, 4 workers": panel(four_gpus),
    }


def draw_throughput(pyplot: Any, data: Data) -> Any:
    """Bars from zero, with the interval as a line, one panel for each machine."""
    figure, axes = pyplot.subplots(
        2, 1, figsize=(8.2, 4.6), sharex=True, height_ratios=[len(panel) for panel in data.values()]
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
        axis.set_xlim(0, 270)
    axes[0].tick_params(bottom=False)
    axes[0].spines["bottom"].set_visible(False)
    axes[-1].set_xlabel("GB per second")
    return figure


def memory() -> Data:
    """Memory of a ready cluster of one rank, against its workers."""

    def lines(places: Mapping[int, tuple[str, str]], ways: tuple[str, ...]) -> Data:
        return {
            known(way): [
                [workers, rounded(value(name, "results", shape, way, "pss_total"))]
                for workers, (name, shape) in places.items()
            ]
            for way in ways
        }

    cpu = {workers: ("startup-openmpi", f"1x{workers}") for workers in (1, 2, 4)}
    gpu = {workers: (f"startup-{workers}xH200", f"1x{workers}") for workers in (1, 2, 4)}
    return {
        "CPU workers, 2 cores": lines(cpu, (OURS, "dask-mpi", "LocalCluster")),
        "GPU workers, 1 to 4×H200": lines(gpu, (OURS, "dask-mpi", "LocalCUDACluster")),
    }


def draw_memory(pyplot: Any, data: Data) -> Any:
    """Lines with their names at the right end, one panel for each kind of worker."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8.2, 4.2), sharey=True)
    for axis, (title, lines) in zip(axes, data.items(), strict=True):
        styles = zip(lines.values(), (BLUE, ORANGE, GREEN), ("o", "s", "^"), strict=True)
        for points, colour, marker in styles:
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, linewidth=2)
        ends = spread([points[-1][1] for points in lines.values()], 55)
        for way, place, colour in zip(lines, ends, (BLUE, ORANGE, GREEN), strict=True):
            axis.text(4.15, place, f"{way}: {lines[way][-1][1]:.0f}", color=colour, va="center")
        axis.set_xticks([1, 2, 4])
        axis.set_xlim(0.7, 6.9)
        axis.set_ylim(0, 1150)
        axis.grid(axis="y", color="#e0e0e0")
        axis.set_title(title, loc="left")
        axis.set_xlabel("workers of one rank")
    axes[0].set_ylabel("memory of all processes, MiB (PSS)")
    return figure


PLOTS = (
    Plot("startup", "Start-up by phase", phases, draw_phases),
    Plot("ranks", "Time until a cluster is ready, against the ranks of one node", ranks, draw_ranks),
    Plot("transfers", "Transfers between GPU workers", throughput, draw_throughput),
    Plot("memory", "Memory of a ready cluster, against its workers", memory, draw_memory),
)


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
    text = plot.file.read_text(encoding="utf-8")
    plot.file.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE), encoding="utf-8")
