"""What the plots of docs/performance.md show: as plain data, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measured.results import OURS, interval, known, load, rates, value

Data = dict[str, Any]


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
            "1 rank × 2 workers\non 2×H100": group(
                "startup-2xH100", "1x2", ("limit, quick MPI",), "LocalCUDACluster"
            ),
        },
    }


def say_phases(data: Data) -> str:
    """The bars in words."""
    parts = []
    for title, groups in data.items():
        for shape, group in groups.items():
            found = {"dask-gpu-mpi": sum(group["parts"]), **group["others"]}
            seconds = ", ".join(f"{way} {figure:.2f} s" for way, figure in found.items())
            parts.append(f"{title}, {' '.join(shape.split())}: {seconds}.")
    return " ".join(parts)


def ranks() -> Data:
    """Seconds until ready of jobs of many ranks, and of ranks that only import."""
    rows = load("scale-real-32-cores")["real"]
    return {
        "ranks": [row["ranks"] for row in rows],
        "ready": [rounded(row["ready_s"]) for row in rows],
        "trials": [[rounded(run["ready_s"]) for run in row["runs"]] for row in rows],
        "imports": [rounded(row["limit_s"]) for row in rows],
    }


def say_ranks(data: Data) -> str:
    """The right ends of the lines in words."""
    return (
        f"With {data['ranks'][-1]} ranks on 32 cores a cluster is ready after {data['ready'][-1]:.1f} s, "
        f"ranks that only import after {data['imports'][-1]:.1f} s."
    )


def throughput() -> Data:
    """GB/s between GPU workers: medians, and the intervals of the means of the trials."""
    sums, columns = (load(name)["runs"][0] for name in ("transfer-2xH100", "transfer-all-to-all-2xH100"))

    def panel(found: Mapping[str, list[Any]]) -> Data:
        return {
            way: {"median": rounded(median), "interval": [rounded(end) for end in interval(trials) or ()]}
            for way, (median, trials) in found.items()
        }

    return {
        title: panel({known(way): [run["median_GB_s"][way], rates(run, way)] for way in run["seconds"]})
        for title, run in (
            ("(x + x.T).sum() of an array of 12.8 GB", sums),
            ("an array of 12.8 GB from rows to columns", columns),
        )
    }


def say_throughput(data: Data) -> str:
    """The medians in words."""
    parts = []
    for title, found in data.items():
        medians = "; ".join(f"{way}: {figures['median']:.3g}" for way, figures in found.items())
        parts.append(f"{title}, GB/s: {medians}.")
    return " ".join(parts)


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
    gpu = {workers: ("startup-2xH100", f"1x{workers}") for workers in (1, 2)}
    return {
        "CPU workers, 2 cores": lines(cpu, (OURS, "dask-mpi", "LocalCluster")),
        "GPU workers, 2×H100": lines(gpu, (OURS, "dask-mpi", "LocalCUDACluster")),
    }


def say_memory(data: Data) -> str:
    """Both ends of the lines in words."""
    parts = []
    for title, lines in data.items():
        ends = ", ".join(f"{way} {line[0][1]:.0f} to {line[-1][1]:.0f}" for way, line in lines.items())
        parts.append(f"{title}, MiB with one worker and with {next(iter(lines.values()))[-1][0]}: {ends}.")
    return " ".join(parts)
