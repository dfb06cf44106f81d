"""The tables of starts, many ranks and faults: one function for each kind of result file."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from measured.results import OURS, caption, known, load, number, ratio, ratios, table


def shape(text: str) -> str:
    """``2x4`` as ``2 × 4``."""
    return text.replace("x", " × ")


def startup(name: str, about: str) -> str:
    """Start, end, CPU seconds and memory of each configuration, shape by shape."""
    document = load(name)
    rows = []
    for each, ways in document["results"].items():
        for way, row in ways.items():
            found = [] if way == OURS else ratios(document["runs"][each], way)
            rows.append(
                [
                    shape(each),
                    known(way),
                    row["runs"],
                    *(
                        number(row[column])
                        for column in ("ready_s", "end_s", "cpu_ready_s", "cpu_s", "pss_total")
                    ),
                    ratio(found),
                ]
            )
    head = [
        "ranks × workers",
        "configuration",
        "trials",
        "ready, s",
        "end, s",
        "CPU until ready, s",
        "CPU in total, s",
        "memory, MiB",
        "ready, dask-gpu-mpi ÷ this",
    ]
    return caption(name, about) + table(head, rows)


def compared(name: str, about: str, names: Mapping[str, str]) -> str:
    """Checkouts measured beside this one: seconds until ready, and ratios with their intervals."""
    document = load(name)
    rows = [
        [
            shape(each),
            names.get(way, known(way)),
            row["runs"],
            number(row["ready_s"]),
            "" if way == OURS else ratio(ratios(document["runs"][each], way)),
            "" if way == OURS else ratio(ratios(document["runs"][each], way, "cpu_ready_s")),
        ]
        for each, ways in document["results"].items()
        for way, row in ways.items()
    ]
    head = [
        "ranks × workers",
        "checkout",
        "trials",
        "ready, s",
        "ready, the first ÷ this",
        "CPU until ready, the first ÷ this",
    ]
    return caption(name, about) + table(head, rows)


def real_jobs(name: str, about: str) -> str:
    """Jobs of many ranks on one machine."""
    rows = [
        [
            row["ranks"],
            len(row["runs"]),
            number(row["ready_s"]),
            number(row["seconds"]),
            number(row["registrations_per_s"]),
            number(row["limit_s"]),
            f"{row['ready_over_limit']:.2f}",
            f"{sum(run['right'] for run in row['runs'])} of {len(row['runs'])}",
        ]
        for row in load(name)["real"]
    ]
    head = [
        "ranks",
        "trials",
        "ready, s",
        "whole job, s",
        "registrations per s",
        "ranks that only import, s",
        "ready ÷ that",
        "right result",
    ]
    return caption(name, about) + table(head, rows)


def emulated_ranks(name: str, about: str) -> str:
    """What rank 0 does for up to 65,536 ranks."""

    def cell(step: Mapping[str, float]) -> str:
        return f"{number(step['seconds'])} s, {number(step['bytes'] / 1e6)} MB"

    rows = []
    for row in load(name)["simulated"]:
        steps = row["steps"]
        whole = steps["client's plan"]
        largest = max(steps[step]["largest"] for step in ("gather", "prove", "scatter", "go"))
        rows.append(
            [
                f"{row['ranks']:,}",
                cell(steps["gather"]),
                f"{number(steps['plan']['seconds'])} s",
                *(cell(steps[step]) for step in ("prove", "scatter", "go")),
                f"{number(largest / 1e3)} KB",
                f"{number(whole['largest'] / 1e6)} MB",
            ]
        )
    head = [
        "ranks",
        "registrations gathered",
        "plan",
        "reachability test",
        "parts of the plan",
        "start messages",
        "largest message",
        "plan for the client",
    ]
    return caption(name, about) + table(head, rows)


def joining(name: str, about: str) -> str:
    """The scheduler's CPU time for each worker that joins, by step, before a change and after it, in turn."""
    runs = load(name)["runs"]
    rows = []
    for workers in sorted({run["workers"] for run in runs}):
        means = {
            when: {
                step: statistics.mean(
                    run["steps"][step]["scheduler_cpu_ms_each"]
                    for run in runs
                    if (run["workers"], run["version"]) == (workers, when)
                )
                for step in ("nanny", "worker", "heartbeat")
            }
            for when in ("before", "after")
        }
        before, after = means.values()
        steps = [f"{number(before[step])} → {number(after[step])}" for step in before]
        sums = sum(before.values()), sum(after.values())
        rows.append(
            [f"{workers:,}", *steps, f"{number(sums[0])} → {number(sums[1])}", number(sums[1] / sums[0])]
        )
    head = ["workers", "nanny, ms", "worker, ms", "first heartbeat, ms", "all three, ms", "after ÷ before"]
    return caption(name, about) + table(head, rows)


def opened_files(name: str, about: str) -> str:
    """Files opened until a cluster is ready."""
    document = load(name)
    kinds = ("launcher", "driver", "rank", "agent", "worker", "scheduler")
    rows = [
        [
            f"{row['ranks']} × {row['workers_each']}",
            *(f"{row['roles'][kind]['opened']:,}" for kind in kinds),
            f"{row['host']['opened']:,}",
        ]
        for row in document["rows"]
    ]
    head = [
        "ranks × workers",
        "launcher",
        "CUDA keep-alive process",
        "ranks",
        "agents",
        "workers",
        "scheduler",
        "the node",
    ]
    growth = document["growth_per_worker"].values()
    opened = max(row["opened"] for row in growth)
    modules = max(row["modules"] for row in growth)
    return (
        caption(name, about)
        + table(head, rows)
        + f"\nOne more worker of a rank opens {opened:.0f} files, {modules:.0f} of them modules of Python.\n"
    )


def staged(name: str, about: str) -> str:
    """Starts from a slow file system, with and without copies, and the model."""
    rows = [
        [
            number(1000 * load(name)["delay_s"]),
            row["nodes"],
            len(row["runs"]),
            *(number(row[f"{way}_ready_s"]) for way in ("slow", "staged")),
            number(row["copied_s"]),
            ratio([run["staged"]["ready_s"] / run["slow"]["ready_s"] for run in row["runs"]]),
            *(f"{row[f'{way}_opened']:,.0f}" for way in ("slow", "staged")),
        ]
        for row in load(name)["rows"]
    ]
    head = [
        "an `open`, ms",
        "nodes",
        "pairs",
        "ready, s",
        "ready with `--stage`, s",
        "of which copies, s",
        "ready, with ÷ without",
        "files opened",
        "files opened with `--stage`",
    ]
    model = [
        [f"{row['nodes']:,}", number(row["slow_s"]), number(row["staged_s"])] for row in load(name)["model"]
    ]
    modelled = table(["nodes", "waits for files, s", "the same and copies with `--stage`, s"], model)
    return f"{caption(name, about)}{table(head, rows)}\nThe model:\n\n{modelled}"


def soak(name: str, about: str) -> str:
    """Clusters with faults: how many, how long, what went wrong."""
    outcomes = load(name)["outcomes"]
    rows = [
        [
            fault,
            count,
            number(statistics.median(each["seconds"] for each in outcomes if each["fault"] == fault)),
            sum(bool(each["wrong"]) for each in outcomes if each["fault"] == fault),
        ]
        for fault, count in sorted(Counter(each["fault"] for each in outcomes).items())
    ]
    rows.append(
        [
            "all",
            len(outcomes),
            number(statistics.median(each["seconds"] for each in outcomes)),
            sum(bool(each["wrong"]) for each in outcomes),
        ]
    )
    return caption(name, about) + table(["fault", "clusters", "seconds, median", "wrong outcomes"], rows)
