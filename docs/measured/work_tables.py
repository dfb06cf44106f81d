"""The tables of running clusters: idle, tasks, transfers, strangers; one function for each kind of result file."""

from __future__ import annotations

from measured.results import WARM_UP, caption, known, load, number, rates, ratio, table

UCX, BESIDE = "ours, UCX", "TLS and UCX"


def idle(name: str, about: str) -> str:
    """The CPU time and the memory of an idle cluster, per rank."""
    document = load(name)
    runs = document.get("runs", [document])
    rows = []
    for run in runs:
        for row in run["idle"]:
            cpu = row["cpu_percent_per_rank"]
            rows.append(
                [
                    f"{run['ranks']} × {run['workers'] // run['ranks']}",
                    known(row["way"]),
                    number(row["cpu_percent_per_rank_all"]),
                    *(number(cpu.get(kind)) for kind in ("worker", "scheduler", "agent", "rank")),
                    number(sum(row["pss_mib_per_rank"].values())),
                ]
            )
    head = [
        "ranks × workers",
        "cluster",
        "CPU of a rank, % of a core",
        "of it workers",
        "scheduler",
        "agent",
        "rank",
        "memory of a rank, MiB",
    ]
    return caption(name, about, runs) + table(head, rows)


def rapids(name: str, about: str) -> str:
    """Pairs of rapids.py."""
    rows = []
    for benchmark, pairs in load(name)["pairs"].items():
        unit, scale = ("queries/s", 1.0) if benchmark == "polars" else ("GB/s", 1e9)
        rows += [
            [benchmark, unit, number(ours / scale), number(other / scale), number(ours / other)]
            for ours, other in pairs
        ]
    return caption(name, about) + table(["benchmark", "unit", "dask-gpu-mpi", "the other", "ratio"], rows)


def tasks(name: str, about: str) -> str:
    """Latency and rate of empty tasks; ratios against LocalCluster within trials."""
    found = load(name)["tasks"]
    peer = "LocalCluster, tcp"

    def column(way: str, key: str) -> str:
        return ratio([trial[way][key] / trial[peer][key] for trial in found["rounds"]])

    rows = [
        [
            known(way),
            len(found["rounds"]),
            number(row["latency_ms"]),
            number(row["tasks_per_s"]),
            *("" if way == peer else column(way, key) for key in ("latency_ms", "tasks_per_s")),
        ]
        for way, row in found["medians"].items()
    ]
    head = [
        "cluster",
        "trials",
        "latency, ms",
        "tasks per s",
        "latency ÷ LocalCluster's",
        "tasks ÷ LocalCluster's",
    ]
    return caption(name, about) + table(head, rows)


def transfers(name: str, about: str) -> str:
    """GB/s of arrays that cross between workers, run by run."""
    rows = []
    runs = load(name)["runs"]
    for count, run in enumerate(runs, 1):
        side = round((run["bytes"] / 8) ** 0.5)
        first = next(iter(run["seconds"]))
        for way, trials in run["seconds"].items():
            pairs = zip(rates(run, first), rates(run, way), strict=False)
            rows.append(
                [
                    count,
                    f"{side:,} ({number(run['bytes'] / 1e9)} GB)",
                    known(way),
                    len(rates(run, way)),
                    sum(max(0, len(trial) - WARM_UP) for trial in trials),
                    number(run["median_GB_s"][way]),
                    "" if way == first else ratio([own / other for own, other in pairs]),
                ]
            )
    head = [
        "run",
        "rows of the array",
        "configuration",
        "trials",
        "repetitions",
        "GB/s",
        "the run's first ÷ this",
    ]
    return caption(name, about, runs) + table(head, rows)


def comms(name: str, about: str) -> str:
    """One array at a time between two processes on a GPU."""
    rows = []
    for size, row in load(name)["results"].items():
        for way, trials in row["trials"].items():
            pairs = zip(row["trials"][BESIDE], trials, strict=True)
            rows.append(
                [
                    f"{int(size) // 10**6:,} MB",
                    known(way),
                    len(trials),
                    number(row["gb_per_s"][way]),
                    "" if way == BESIDE else ratio([own / other for own, other in pairs]),
                ]
            )
    head = ["array", "transport", "trials", "GB/s", "UCX beside TLS ÷ this"]
    return caption(name, about) + table(head, rows)


def recorded(name: str, about: str) -> str:
    """The scheduler with the recorder of a report, and without."""
    document = load(name)
    rows = [
        [
            row["workers"],
            number(row["tasks_per_s"]),
            len(row["rounds"]),
            number(row["with_percent"]),
            number(row["without_percent"]),
            number(row["difference_percent"]),
        ]
        for row in document["report"]["cpu"]
    ]
    head = [
        "workers",
        "tasks per s",
        "pairs",
        "with, % of a core",
        "without, % of a core",
        "difference, median",
    ]
    return caption(name, about) + table(head, rows)


def attacked(name: str, about: str) -> str:
    """The same work, undisturbed and under attack."""
    document = load(name)
    pairs = [(trial["attacked"]["seconds"], trial["undisturbed"]["seconds"]) for trial in document["rounds"]]
    row = [
        len(pairs),
        number(document["rate"]),
        number(document["undisturbed_s"]),
        number(document["attacked_s"]),
        ratio([hostile / quiet for hostile, quiet in pairs]),
        document.get("lines", "–"),
    ]
    head = ["trials", "connections per s", "undisturbed, s", "under attack, s", "ratio", "lines of output"]
    return caption(name, about) + table(head, [row])
