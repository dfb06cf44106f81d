"""What a cluster costs while it idles, and how quick its tasks are, beside LocalCluster of the same size; TLS beside TCP.

    python benchmarks/overhead.py --workers 2 --rounds 5 --json benchmarks/results/overhead.json

Run it with the Python of an environment that has an MPI: that MPI's mpirun is used. All clusters have one host and workers with
one thread each. A round measures every way once, in an order that changes from round to round; ratios are taken within a round.

Idle: CPU seconds of all processes over ``--idle`` seconds, and memory (PSS), by kind of process, with ``--ranks`` ranks of one
worker each. Tasks: seconds from ``submit`` to the result of one empty task (median of 300), and empty tasks in a second (1,000 at
once, the best of three).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from startup import (
    HEAD,
    MARK,
    OURS,
    PR_SET_CHILD_SUBREAPER,
    START_LIMIT,
    cpu_of,
    default_launcher,
    kind_of,
    machine,
    members,
    middle,
    pss_of,
    read,
    reap,
    wait_for,
)

TASKS = """
    client.wait_for_workers(count)
    note("ready", {"time": time.time(), "scheduler": client.run_on_scheduler(os.getpid)})
    while os.environ["STARTUP_IDLE"] == "1" and not os.path.exists(os.path.join(folder, "go-on")):
        time.sleep(0.05)
    if os.environ["STARTUP_IDLE"] == "0":
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
        note("tasks", {"time": time.time(), "latency_ms": 1e3 * sorted(waits)[150], "tasks_per_s": max(rates)})
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
#: Name: which script, further options.
WAYS: dict[str, tuple[str, list[str]]] = {
    "ours, tcp": (OURS, ["--no-security"]),
    "ours, tls": (OURS, []),
    "LocalCluster, tcp": ("LocalCluster", []),
}


class Cluster:
    """A cluster that runs while the block does, with its folder and its mark."""

    def __init__(self, way: str, ranks: int, workers: int, options: Any, *, idle: bool) -> None:
        which, extra = WAYS[way]
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="ov-"))
        (self.folder / "t").mkdir()
        script = self.folder / "script.py"
        script.write_text(HEAD + SCRIPTS[which])
        environ = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.folder / "t"),
            "STARTUP_FOLDER": str(self.folder),
            "STARTUP_WORKERS": str(workers),
            "STARTUP_IDLE": str(int(idle)),
        }
        command = [sys.executable, str(script)]
        if which == OURS:
            more = ["--cpu-workers", str(workers - ranks), "--nthreads", "1", *extra]
            launcher = [*options.launcher, "-np", str(ranks)]
            command = [*launcher, sys.executable, "-m", OURS, *more, str(script)]
        with open(self.folder / "out", "wb") as out:
            self.process = subprocess.Popen(
                command, env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def wait(self, name: str) -> dict[str, Any]:
        """What the script notes under this name."""
        found: dict[str, Any] | None = wait_for(lambda: read(self.folder, name, 0), self.mark, START_LIMIT)
        if found is None:
            raise RuntimeError(f"no {name}: {(self.folder / 'out').read_text(errors='replace')[-1500:]}")
        return found

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "go-on").touch()
        limit = time.time() + 15
        while (left := members(self.mark)) and time.time() < limit:
            reap()
            time.sleep(0.05)
        while left:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            left = members(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


def idle(way: str, options: Any) -> dict[str, Any]:
    """CPU and memory of a cluster that does nothing."""
    with Cluster(way, options.ranks, options.ranks, options, idle=True) as cluster:
        ready = cluster.wait("ready")
        time.sleep(options.settle)  # imports of the dashboard, say
        found = members(cluster.mark)
        kinds = {pid: kind_of(pid, found, ready["scheduler"]) for pid in found}
        before = {pid: cpu_of([pid]) for pid in found}
        begun = time.time()
        time.sleep(options.idle)
        seconds = time.time() - begun
        cpu: dict[str, float] = {}
        pss: dict[str, float] = {}
        for pid, kind in kinds.items():
            cpu[kind] = cpu.get(kind, 0.0) + cpu_of([pid]) - before[pid]
            pss[kind] = pss.get(kind, 0.0) + pss_of(pid)
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
            "processes": {kind: list(kinds.values()).count(kind) for kind in dict.fromkeys(kinds.values())},
        }


def tasks(way: str, options: Any) -> dict[str, Any]:
    """Latency and throughput of empty tasks."""
    with Cluster(way, 1, options.workers, options, idle=False) as cluster:
        found = cluster.wait("tasks")
    return {"way": way, "latency_ms": found["latency_ms"], "tasks_per_s": found["tasks_per_s"]}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the idle cluster")
    parser.add_argument("--workers", type=int, default=2, help="workers of the clusters that work")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds to look at the idle cluster")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.launcher = default_launcher()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    where = machine(options.launcher)
    print(", ".join(f"{name} {text}" for name, text in where.items()))
    idles = [idle(way, options) for way in WAYS]
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
    if options.json:
        document = {
            "benchmark": "overhead",
            **where,
            "ranks": options.ranks,
            "workers": options.workers,
            "load": os.getloadavg()[0],
            "idle": idles,
            "tasks": {"medians": medians, "ratios": ratios, "rounds": rounds},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
