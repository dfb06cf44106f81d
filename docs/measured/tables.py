"""The rows of the tables: of docs/performance.md, then of one file of results each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from measured.results import OURS, WARM_UP, known, load, machine, number, parts, rates, ratio, ratios

#: The cells of a row, by the titles of their columns.
Row = dict[str, str | float | None]
#: Names of the checkouts that were measured in turn with the present one.
CHECKOUTS = {OURS: "newer version", "before": "231 modules", "last": "151 modules"}


#: Steps of a whole job that its table shows.
WHOLE = ("ready", "first cuDF result", "last line", "exit")


def starts_of(file: str, shape: str, column: str) -> dict[str, float]:
    """A figure of startup.py for each program that was started in this shape."""
    found = load(file)["results"][shape]
    programs = (OURS, "dask-mpi", "LocalCluster", "LocalCUDACluster")
    return {way: found[way][column] for way in programs if way in found}


def idle_of(part: Mapping[str, Any], other: str) -> dict[str, float]:
    """CPU time per rank of idle clusters, from overhead.py; the other is LocalCluster by this name."""
    found = {row["way"]: row["cpu_percent_per_rank_all"] for row in part["idle"]}
    return {OURS: found["ours, tls"], other: found["LocalCluster, tcp"]}


def compared(figure: str, unit: str, file: str, figures: dict[str, float], best: Callable = min) -> Row:
    """A row: the figures of dask-gpu-mpi, maybe of dask-mpi, last of another program. The best is bold."""
    top = best(figures.values())
    texts = {way: f"**{number(each)}**" if each == top else number(each) for way, each in figures.items()}
    other = list(texts)[-1]
    return {
        "figure": figure,
        "unit": unit,
        "machine": machine(file),
        "dask-gpu-mpi": texts[OURS],
        "dask-mpi": texts.get("dask-mpi", "not measured"),
        "best other": f"{texts[other]} ({other})",
    }


def start_rows(file: str, shape: str, workers: str) -> Iterator[Row]:
    """Time, CPU time and memory of one shape of cluster."""
    yield compared(f"ready, {workers}", "s", file, starts_of(file, shape, "ready_s"))
    yield compared("CPU time of that start", "s", file, starts_of(file, shape, "cpu_ready_s"))
    yield compared(f"memory when ready, {workers}", "MiB", file, starts_of(file, shape, "pss_total"))


def summary() -> Iterator[Row]:
    """The figures that most users ask for."""
    cpu, gpu, shuffle = "startup-openmpi", "startup-2xH200", "transfer-all-to-all-2xH100"
    ucx, tcp = "LocalCUDACluster, UCX", "LocalCluster, TCP"
    end = starts_of(gpu, "1x2", "end_s")
    speed = load(shuffle)["runs"][0]["median_GB_s"]
    arrays = {OURS: speed["ours, UCX beside TLS"], ucx: speed[ucx]}
    medians = load("overhead")["tasks"]["medians"]
    empty = {OURS: medians["ours, tls"]["tasks_per_s"], tcp: medians["LocalCluster, tcp"]["tasks_per_s"]}
    script_end = "from the script's last line to the job's end, 2 ranks × 2 CPU workers"
    yield from start_rows(gpu, "1x2", "one worker on each of 2 GPUs")
    yield from start_rows(cpu, "2x2", "2 ranks × 2 CPU workers")
    yield compared("an array of 12.8 GB from rows to columns, 2 GPUs", "GB/s", shuffle, arrays, max)
    yield compared("empty tasks, 2 CPU workers", "tasks/s", "overhead", empty, max)
    yield compared(script_end, "s", cpu, starts_of(cpu, "2x2", "end_s"))
    yield compared("from the script's last line to the job's end, 2 GPU workers", "s", gpu, end)


def slower() -> Iterator[Row]:
    """Figures in which another program is better."""
    slurm = load("startup-slurm")["results"]["2x1"]
    ready_slurm, memory_slurm = (
        {OURS: slurm[OURS][column], "SLURMRunner without nannies": slurm["SLURMRunner"][column]}
        for column in ("ready_s", "pss_total")
    )
    polars = load("rapids-2xH100")["medians"]["polars"]
    polars = {OURS: polars["ours"], "the cluster of its DaskEngine": polars["other"]}
    quiet = idle_of(load("overhead-2xH100")["runs"][0], "LocalCluster, TCP, of CPU workers")
    tasks = load("overhead")["tasks"]["medians"]
    peer = tasks["LocalCluster, tcp"]
    latency = {OURS: tasks["ours, tls"]["latency_ms"], "LocalCluster, TCP": peer["latency_ms"]}
    rows = [
        compared("ready under Slurm, 2 ranks × 1 worker", "s", "startup-slurm", ready_slurm),
        compared("memory when ready", "MiB", "startup-slurm", memory_slurm),
        *start_rows("startup-openmpi", "4x1", "4 ranks × 1 worker"),
        compared("latency of an empty task", "ms", "overhead", latency),
        compared("a query of Polars on 2 GPUs", "queries/s", "rapids-2xH100", polars, max),
        compared("an idle cluster of 2 GPU workers, per worker", "% of a core", "overhead-2xH100", quiet),
    ]
    for row in rows:
        del row["dask-mpi"]
        row["better"] = row.pop("best other")
        yield row


def gpus() -> Iterator[Row]:
    """Start, end and memory against the number of GPUs, and the ratios within trials."""
    for count, file in ((1, "startup-2xH100"), (2, "startup-2xH100"), (4, "startup-4xH100")):
        found, runs = (load(file)[key][f"1x{count}"] for key in ("results", "runs"))
        for way in (OURS, "dask-mpi", "LocalCUDACluster"):
            memory = found[OURS]["pss_total"] / found[way]["pss_total"]
            yield {
                "GPUs": count,
                "cluster": known(way),
                "ready, s": found[way]["ready_s"],
                "end, s": found[way]["end_s"],
                "memory, MiB": found[way]["pss_total"],
                "ready, dask-gpu-mpi ÷ this": ratio(ratios(runs, way)),
                "memory, dask-gpu-mpi ÷ this": "" if way == OURS else f"{memory:.2f}",
            }


def starts(document: Any) -> Iterator[Row]:
    """Start, end, CPU seconds and memory of each configuration, shape by shape."""
    for shape, ways in document["results"].items():
        for way, row in ways.items():
            yield {
                "ranks × workers": shape.replace("x", " × "),
                "configuration": known(way),
                "trials": row["runs"],
                "ready, s": row["ready_s"],
                "end, s": row["end_s"],
                "CPU until ready, s": row["cpu_ready_s"],
                "CPU in total, s": row["cpu_s"],
                "memory, MiB": row["pss_total"],
                "ready, dask-gpu-mpi ÷ this": ratio(ratios(document["runs"][shape], way)),
            }


def checkouts(document: Any) -> Iterator[Row]:
    """Checkouts measured in turn: seconds until ready, and ratios with their intervals."""
    for shape, ways in document["results"].items():
        runs = document["runs"][shape]
        for way, row in ways.items():
            yield {
                "ranks × workers": shape.replace("x", " × "),
                "checkout": CHECKOUTS.get(way, known(way)),
                "trials": row["runs"],
                "ready, s": row["ready_s"],
                "ready, the first ÷ this": ratio(ratios(runs, way)),
                "CPU until ready, the first ÷ this": ratio(ratios(runs, way, "cpu_ready_s")),
            }


def real_jobs(document: Any) -> Iterator[Row]:
    """Jobs of many ranks on one machine."""
    for row in document["real"]:
        yield {
            "ranks": row["ranks"],
            "trials": len(row["runs"]),
            "ready, s": row["ready_s"],
            "whole job, s": row["seconds"],
            "registrations per s": row["registrations_per_s"],
            "ranks that only import, s": row["limit_s"],
            "ready ÷ that": f"{row['ready_over_limit']:.2f}",
            "right result": f"{sum(run['right'] for run in row['runs'])} of {len(row['runs'])}",
        }


def emulated_ranks(document: Any) -> Iterator[Row]:
    """The work of rank 0 for up to 65,536 ranks."""

    def cell(step: Mapping[str, float]) -> str:
        return f"{number(step['seconds'])} s, {number(step['bytes'] / 1e6)} MB"

    for row in document["simulated"]:
        steps = row["steps"]
        largest = max(steps[step]["largest"] for step in ("meet", "gather", "prove", "scatter", "go"))
        whole = steps["client's plan"]["largest"]
        yield {
            "ranks": row["ranks"],
            "meeting": cell(steps["meet"]),
            "registrations gathered": cell(steps["gather"]),
            "plan": f"{number(steps['plan']['seconds'])} s",
            "reachability test": cell(steps["prove"]),
            "parts of the plan": cell(steps["scatter"]),
            "start messages": cell(steps["go"]),
            "largest message": f"{number(largest / 1e3)} KB",
            "plan for the client": f"{number(whole / 1e6)} MB",
        }


def joining(document: Any) -> Iterator[Row]:
    """The scheduler's CPU time for each worker that joins, by step, before a change and after it, in turn."""

    def mean(workers: int, version: str, step: str) -> float:
        return statistics.mean(
            run["steps"][step]["scheduler_cpu_ms_each"]
            for run in document["runs"]
            if (run["workers"], run["version"]) == (workers, version)
        )

    for workers in sorted({run["workers"] for run in document["runs"]}):
        steps = ("nanny", "worker", "heartbeat")
        before, after = ([mean(workers, version, step) for step in steps] for version in ("before", "after"))
        pairs = zip([*before, sum(before)], [*after, sum(after)], strict=True)
        nanny, worker, heartbeat, whole = (f"{number(old)} → {number(new)}" for old, new in pairs)
        yield {
            "workers": workers,
            "nanny, ms": nanny,
            "worker, ms": worker,
            "first heartbeat, ms": heartbeat,
            "all three, ms": whole,
            "after ÷ before": sum(after) / sum(before),
        }


def opened_files(document: Any) -> Iterator[Row]:
    """Files opened until a cluster is ready."""
    for row in document["rows"]:
        opened = {kind: found["opened"] for kind, found in row["roles"].items()}
        yield {
            "ranks × workers": f"{row['ranks']} × {row['workers_each']}",
            "launcher": opened["launcher"],
            "CUDA keep-alive process": opened["driver"],
            "ranks": opened["rank"],
            "agents": opened["agent"],
            "workers": opened["worker"],
            "scheduler": opened["scheduler"],
            "the node": row["host"]["opened"],
        }


def growth(document: Any) -> str:
    """The files of one more worker, in words."""
    rows = document["growth_per_worker"].values()
    opened, modules = (max(row[key] for row in rows) for key in ("opened", "modules"))
    return f"One more worker of a rank opens {opened:.0f} files, {modules:.0f} of them modules of Python.\n"


def staged(document: Any) -> Iterator[Row]:
    """Starts from a slow file system, with and without copies."""
    for row in document["rows"]:
        pairs = [run["staged"]["ready_s"] / run["slow"]["ready_s"] for run in row["runs"]]
        yield {
            "an `open`, ms": 1000 * document["delay_s"],
            "nodes": row["nodes"],
            "pairs": len(pairs),
            "ready, s": row["slow_ready_s"],
            "ready with `--stage`, s": row["staged_ready_s"],
            "of which copies, s": row["copied_s"],
            "ready, with ÷ without": ratio(pairs),
            "files opened": row["slow_opened"],
            "files opened with `--stage`": row["staged_opened"],
        }


def model(document: Any) -> Iterator[Row]:
    """The model of many nodes that start from a slow file system."""
    for row in document["model"]:
        yield {
            "nodes": row["nodes"],
            "waits for files, s": row["slow_s"],
            "the same and copies with `--stage`, s": row["staged_s"],
        }


def soak(document: Any) -> Iterator[Row]:
    """Clusters with faults: how many, how long, how many wrong outcomes."""
    outcomes = document["outcomes"]
    for fault in (*sorted({each["fault"] for each in outcomes}), "all"):
        found = [each for each in outcomes if fault in (each["fault"], "all")]
        yield {
            "fault": fault,
            "clusters": len(found),
            "seconds, median": statistics.median(each["seconds"] for each in found),
            "wrong outcomes": sum(bool(each["wrong"]) for each in found),
        }


def idle(document: Any) -> Iterator[Row]:
    """The CPU time and the memory of an idle cluster, per rank."""
    for run in parts(document):
        for row in run["idle"]:
            cpu = row["cpu_percent_per_rank"]
            yield {
                "ranks × workers": f"{run['ranks']} × {run['workers'] // run['ranks']}",
                "cluster": known(row["way"]),
                "CPU of a rank, % of a core": row["cpu_percent_per_rank_all"],
                "of it workers": cpu["worker"],
                "scheduler": cpu["scheduler"],
                "agent": cpu.get("agent"),
                "rank": cpu.get("rank"),
                "memory of a rank, MiB": sum(row["pss_mib_per_rank"].values()),
            }


def tasks(document: Any) -> Iterator[Row]:
    """Latency and rate of empty tasks; ratios against LocalCluster within trials."""
    found, peer = document["tasks"], "LocalCluster, tcp"

    def over_peer(way: str, key: str) -> str:
        return ratio([trial[way][key] / trial[peer][key] for trial in found["rounds"] if way != peer])

    for way, row in found["medians"].items():
        yield {
            "cluster": known(way),
            "trials": len(found["rounds"]),
            "latency, ms": row["latency_ms"],
            "tasks per s": row["tasks_per_s"],
            "latency ÷ LocalCluster's": over_peer(way, "latency_ms"),
            "tasks ÷ LocalCluster's": over_peer(way, "tasks_per_s"),
        }


def transfers(document: Any) -> Iterator[Row]:
    """GB/s of arrays that cross between workers, run by run."""
    for count, run in enumerate(document["runs"], 1):
        side = round((run["bytes"] / 8) ** 0.5)
        first = next(iter(run["seconds"]))
        for way, trials in run["seconds"].items():
            pairs = zip(rates(run, first), rates(run, way), strict=False)
            yield {
                "run": count,
                "rows of the array": f"{side:,} ({number(run['bytes'] / 1e9)} GB)",
                "configuration": known(way),
                "trials": len(rates(run, way)),
                "repetitions": sum(max(0, len(trial) - WARM_UP) for trial in trials),
                "GB/s": run["median_GB_s"][way],
                "the run's first ÷ this": "" if way == first else ratio([a / b for a, b in pairs]),
            }


def rapids(document: Any) -> Iterator[Row]:
    """Pairs of rapids.py."""
    for benchmark, pairs in document["pairs"].items():
        unit, scale = ("queries/s", 1.0) if benchmark == "polars" else ("GB/s", 1e9)
        for ours, other in pairs:
            yield {
                "benchmark": benchmark,
                "unit": unit,
                "dask-gpu-mpi": ours / scale,
                "the other": other / scale,
                "ratio": ours / other,
            }


def comms(document: Any) -> Iterator[Row]:
    """One array at a time between two processes, by transport."""
    both = "TLS and UCX"
    for size, row in document["results"].items():
        for way, trials in row["trials"].items():
            pairs = zip(row["trials"][both], trials, strict=True)
            yield {
                "array": f"{int(size) // 10**6:,} MB",
                "transport": known(way),
                "trials": len(trials),
                "GB/s": row["gb_per_s"][way],
                "UCX beside TLS ÷ this": "" if way == both else ratio([a / b for a, b in pairs]),
            }


def between(document: Any) -> Iterator[Row]:
    """Data between two nodes: medians of the rounds, by way."""
    for way, rounds in document["trials"].items():
        names = dict.fromkeys(name for found in rounds for name in found)
        in_one_node = way == "ours" and document.get("nodes") == 1  # GPU memory goes over UCX, not encrypted
        yield {
            "way": known(OURS if in_one_node else way),
            **{name: statistics.median(found[name] for found in rounds) for name in names},
        }


def whole_job(document: Any) -> Iterator[Row]:
    """A job from its launch to its exit: medians of seconds, and of ratios within pairs."""
    other = document["trials"]["LocalCUDACluster, UCX"]
    for way, rounds in document["trials"].items():
        yield {
            "way": known(OURS if way == "ours" else way),  # GPU memory goes over UCX, not encrypted
            **{f"{name}, s": statistics.median(found[name] for found in rounds) for name in WHOLE},
        }
    pairs = list(zip(document["trials"]["ours"], other, strict=True))
    yield {
        "way": "ratio within pairs",
        **{f"{name}, s": f"{statistics.median(a[name] / b[name] for a, b in pairs):.2f}" for name in WHOLE},
    }


def recorded(document: Any) -> Iterator[Row]:
    """The scheduler with the recorder of a report, and without."""
    for row in document["report"]["cpu"]:
        yield {
            "workers": row["workers"],
            "tasks per s": float(row["tasks_per_s"]),
            "pairs": len(row["rounds"]),
            "with, % of a core": row["with_percent"],
            "without, % of a core": row["without_percent"],
            "difference, median": row["difference_percent"],
        }


def attacked(document: Any) -> Iterator[Row]:
    """The same work, undisturbed and under attack."""
    trials = document["rounds"]
    yield {
        "trials": len(trials),
        "connections per s": document["rate"],
        "undisturbed, s": document["undisturbed_s"],
        "under attack, s": document["attacked_s"],
        "ratio": ratio([trial["attacked"]["seconds"] / trial["undisturbed"]["seconds"] for trial in trials]),
        "lines of output": document.get("lines"),
    }
