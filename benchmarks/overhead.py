"""Cost of an idle cluster, and speed of its tasks, against LocalCluster of the same size; TLS against TCP.

    python benchmarks/overhead.py --rounds 5 --json benchmarks/results/overhead.json --plot benchmarks/results/overhead.png
    python benchmarks/overhead.py --rounds 0 --idle 0 --script 5 --report-workers 0 --json benchmarks/results/overhead-script.json

Run it with the Python of an environment that has an MPI: that MPI's mpirun is used. All clusters have one host and workers with
one thread each. A trial measures every configuration once, in an order that changes from trial to trial; ratios are taken
within a trial.

Idle: CPU seconds of all processes over ``--idle`` seconds, and memory (PSS), by kind of process, with ``--ranks`` ranks of one
worker each. Tasks: seconds from ``submit`` to the result of one empty task (median of 300), and empty tasks in a second (1,000
at once, the best of three). Script (``--script``): a pure Python loop in the script of a cluster, without a client and with an
idle one, against the same script without a cluster, in wall-clock seconds and in CPU seconds of its process; and the CPU seconds
of that process while the script sleeps. What a report costs (``--report-workers``) is in `recording`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import recording
from common import (
    COLOURS,
    OURS,
    START_LIMIT,
    Job,
    bars,
    become_reaper,
    by_kind,
    cluster,
    count_kinds,
    cpu_of,
    default_launcher,
    drawing,
    introduce,
    machine,
    middle,
    parser_for,
    pss_of,
    save,
    write,
)

TASKS = """
    client.wait_for_workers(count)
    note("ready", scheduler=client.run_on_scheduler(os.getpid))
    while os.environ["OVERHEAD_IDLE"] == "1" and not os.path.exists(os.path.join(folder, "go-on")):
        time.sleep(1.0)  # sampling twenty times a second took 0.36 % of a core itself
    if os.environ["OVERHEAD_IDLE"] == "0":
        client.gather(client.map(abs, range(500)))
        waits = []
        for number in range(300):
            begun = time.perf_counter()
            client.submit(abs, -number - 1).result()
            waits.append(time.perf_counter() - begun)
        rates = []
        for turn in range(3):
            begun = time.perf_counter()
            client.gather(client.map(abs, range(1000 * (turn + 1), 1000 * (turn + 2))))
            rates.append(1000 / (time.perf_counter() - begun))
        note("tasks", latency_ms=1e3 * sorted(waits)[150], tasks_per_s=max(rates))
"""
CLUSTER = """
if __name__ == "__main__":
    from distributed import Client, LocalCluster
    with LocalCluster(n_workers=count, threads_per_worker=1) as cluster, Client(cluster) as client:
"""
SCRIPTS = {
    OURS: "if True:\n    from distributed import Client\n    with Client() as client:\n"
    + TASKS.replace("\n", "\n    "),
    "LocalCluster": CLUSTER + TASKS.replace("\n", "\n    "),
}
#: A script that computes alone, and one that sleeps: how much do others take of its process?
SCRIPT = """
LOOP = '''
def loop(count):
    total = 0
    for number in range(count):
        total += number * number % 7
    return total
'''
def parts(count, number):
    # where a function lies in memory makes it a tenth slower or faster: so it is made again and again
    kept = []
    for part in range(number):
        space = {}
        exec(LOOP, space)
        kept.append((space, [object() for _ in range(100 * part)]))
        space["loop"](count // number)
from distributed import Client  # without a cluster too, for the same memory
client = None
if os.environ["OVERHEAD_CLIENT"] == "1":
    client = Client()
    client.wait_for_workers(count)
time.sleep(float(os.environ["OVERHEAD_SETTLE"]))
begun, before = time.perf_counter(), time.process_time()
parts(int(os.environ["OVERHEAD_LOOP"]), 30)
note("looped", seconds=time.perf_counter() - begun, cpu_s=time.process_time() - before)
before = time.process_time()
time.sleep(float(os.environ["OVERHEAD_IDLE"]))
note("slept", cpu_s=time.process_time() - before)
if client is not None:
    client.close()
"""
#: Its turns: a loop of some two seconds.
LOOP = 30_000_000
ALONE, CLUSTER_ALONE, CLUSTER_CLIENT = "no cluster", "cluster", "cluster, idle client"
#: Name: which script, further options.
WAYS: dict[str, tuple[str, list[str]]] = {
    "ours, tcp": (OURS, ["--no-security"]),
    "ours, tls": (OURS, []),
    "LocalCluster, tcp": ("LocalCluster", []),
}


def start(job: Job, way: str, ranks: int, workers: int, launcher: Sequence[str]) -> None:
    """Start a cluster of this configuration."""
    which, extra = WAYS[way]
    more: list[str | Path] = ["--cpu-workers", str(workers - ranks), "--nthreads", "1", *extra, job.script]
    job.start(cluster(launcher, ranks, *more) if which == OURS else [sys.executable, str(job.script)])


def waited(job: Job, name: str) -> dict[str, Any]:
    """What the script notes under this name; else an error with its last output."""
    found = job.wait(name)
    if found is None:
        raise RuntimeError(f"no {name}: {job.output()}")
    return found


def idle(way: str, options: Any) -> dict[str, Any]:
    """CPU and memory of a cluster that does nothing."""
    with Job(SCRIPTS[WAYS[way][0]], options.ranks, OVERHEAD_IDLE=1) as job:
        start(job, way, options.ranks, options.ranks, options.launcher)
        ready = waited(job, "ready")
        time.sleep(options.settle)  # imports of the dashboard, for example
        found = job.members()
        before = {pid: cpu_of([pid]) for pid in found}
        begun = time.time()
        time.sleep(options.idle)
        seconds = time.time() - begun
        taken = {pid: cpu_of([pid]) - before[pid] for pid in found}
        cpu = by_kind(taken, found, ready["scheduler"])
        pss = by_kind({pid: pss_of(pid) for pid in found}, found, ready["scheduler"])
        job.go_on()
        job.wait_for_end()
        return {
            "way": way,
            "cpu_percent_per_rank": {k: round(100 * v / seconds / options.ranks, 3) for k, v in cpu.items()},
            "cpu_percent_per_rank_all": round(100 * sum(cpu.values()) / seconds / options.ranks, 3),
            "pss_mib_per_rank": {k: round(v / options.ranks, 1) for k, v in pss.items()},
            "pss_mib_per_rank_beyond_worker": round(
                sum(v for k, v in pss.items() if k not in ("worker", "scheduler", "launcher"))
                / options.ranks,
                1,
            ),
            "processes": count_kinds(found, ready["scheduler"]),
        }


def tasks(way: str, options: Any) -> dict[str, Any]:
    """Latency and throughput of empty tasks."""
    with Job(SCRIPTS[WAYS[way][0]], options.workers, OVERHEAD_IDLE=0) as job:
        start(job, way, 1, options.workers, options.launcher)
        found = waited(job, "tasks")
        job.wait_for_end()
    return {"way": way, "latency_ms": found["latency_ms"], "tasks_per_s": found["tasks_per_s"]}


def script(way: str, options: Any, sleep: float) -> dict[str, Any]:
    """A loop in a script, in wall-clock and CPU seconds, and the CPU seconds while it sleeps."""
    client = int(way == CLUSTER_CLIENT)
    with Job(
        SCRIPT,
        options.ranks,
        OVERHEAD_CLIENT=client,
        OVERHEAD_SETTLE=options.settle,
        OVERHEAD_LOOP=LOOP,
        OVERHEAD_IDLE=sleep,
    ) as job:
        if way == ALONE:
            job.start([sys.executable, str(job.script)])
        else:
            job.start(cluster(options.launcher, options.ranks, "--nthreads", "1", job.script))
        looped = waited(job, "looped")
        slept = job.wait("slept", limit=sleep + START_LIMIT)
        job.wait_for_end()
    return {
        "way": way,
        "loop_s": looped["seconds"],
        "loop_cpu_s": looped["cpu_s"],
        "sleep_s": sleep,
        "sleep_cpu_s": slept["cpu_s"] if slept else None,
    }


def scripts(options: Any) -> dict[str, Any]:
    """All ways in turn; each sleeps once, in the first round."""
    names = [ALONE, CLUSTER_ALONE, CLUSTER_CLIENT]
    rounds = []
    for number in range(options.script):
        turn = number % len(names)
        sleep = 0.0 if number else options.script_idle
        rounds.append({way: script(way, options, sleep) for way in (*names[turn:], *names[:turn])})
    found: dict[str, Any] = {"rounds": rounds, "ways": {}}
    for way in names:
        row: dict[str, Any] = {
            f"{key} ratio": middle([each[way][key] / each[ALONE][key] for each in rounds])
            for key in ("loop_s", "loop_cpu_s")
        }
        row |= {key: middle([each[way][key] for each in rounds]) for key in ("loop_s", "loop_cpu_s")}
        row |= {key: rounds[0][way][key] for key in ("sleep_s", "sleep_cpu_s")} if rounds else {}
        found["ways"][way] = row
    return found


def plot(
    idles: Sequence[Mapping[str, Any]], medians: Mapping[str, Mapping[str, Any]], file: Path | None
) -> None:
    """CPU and memory of an idle cluster, by kind of process, as stacks; latency and tasks per second as bars."""
    pyplot = drawing(file)
    if pyplot is None or file is None:
        return
    panels = (2 if idles else 0) + (2 if any(row["latency_ms"] for row in medians.values()) else 0)
    if panels == 0:
        return
    figure, axes = pyplot.subplots(1, panels, figsize=(3.6 * panels, 3.2), squeeze=False)
    rest = list(axes.flat)
    for key, title in (
        ("cpu_percent_per_rank", "idle: CPU, % of a core per rank"),
        ("pss_mib_per_rank", "idle: PSS, MiB per rank"),
    ):
        if not idles:
            break
        axis = rest.pop(0)
        names = [row["way"].replace(", ", "\n") for row in idles]
        under = [0.0] * len(idles)
        for number, kind in enumerate(dict.fromkeys(kind for row in idles for kind in row[key])):
            heights = [row[key].get(kind, 0.0) for row in idles]
            axis.bar(names, heights, 0.6, bottom=under, label=kind, color=COLOURS[number % len(COLOURS)])
            under = [low + height for low, height in zip(under, heights, strict=True)]
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(y=0.45)
        axis.legend(fontsize=7, ncols=2, frameon=False)
    for key, title in (("latency_ms", "latency of a task, ms"), ("tasks_per_s", "tasks in a second")):
        if rest:
            axis = rest.pop(0)
            bars(axis, {"": {way: row[key] for way, row in medians.items()}}, title)
            axis.margins(y=0.45)
            axis.legend(fontsize=7, frameon=False)
    save(figure, file)


def main() -> int:
    """Measure, print, write."""
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the idle cluster")
    parser.add_argument("--workers", type=int, default=2, help="workers of the clusters that work")
    parser.add_argument("--rounds", type=int, default=5, help="of tasks; 0: none")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds to look at the idle cluster; 0: not at all"
    )
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before that")
    parser.add_argument("--script", type=int, default=0, help="rounds of a loop in the script; 0: none")
    parser.add_argument(
        "--script-idle", type=float, default=60.0, help="seconds that the script sleeps, in the first of them"
    )
    recording.add_arguments(parser)
    options = parser.parse_args()
    options.launcher = default_launcher()
    become_reaper()
    where = {"benchmark": "overhead", **machine(options.launcher)}
    introduce(where)
    idles = [idle(way, options) for way in WAYS] if options.idle else []
    for row in idles:
        print(
            f"idle, {options.ranks} ranks of one worker, {row['way']}: {row['cpu_percent_per_rank_all']} % of a core per rank"
        )
        print(f"  CPU by kind of process, % per rank: {row['cpu_percent_per_rank']}")
        print(f"  PSS by kind of process, MiB per rank: {row['pss_mib_per_rank']}")
    names = list(WAYS)
    rounds = []
    for number in range(options.rounds):
        turn = number % len(names)
        rounds.append({way: tasks(way, options) for way in (*names[turn:], *names[:turn])})
    medians = {
        way: {key: middle([each[way][key] for each in rounds]) for key in ("latency_ms", "tasks_per_s")}
        for way in names
    }
    ratios = {
        f"{one} / {other}": {
            key: middle([each[one][key] / each[other][key] for each in rounds])
            for key in ("latency_ms", "tasks_per_s")
        }
        for one, other in (("ours, tcp", "LocalCluster, tcp"), ("ours, tls", "ours, tcp"))
    }
    for title, rows in (
        (f"{options.workers} workers, median", medians),
        ("ratio within rounds, median", ratios),
    ):
        for way, row in rows.items():
            print(f"{title}: {way}: latency {row['latency_ms']}, tasks in a second {row['tasks_per_s']}")
    in_script = scripts(options)
    for way, row in in_script["ways"].items() if options.script else ():
        print(f"script, {options.ranks} ranks of one worker, {way}: {row}")
    report = recording.measure(options)
    document = {
        **where,
        "report": report,
        "ranks": options.ranks,
        "workers": options.workers,
        "idle": idles,
        "script": in_script,
        "tasks": {"medians": medians, "ratios": ratios, "rounds": rounds},
    }
    write(options.json, document)
    plot(idles, medians, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
