"""Files that a start opens and searches for on a node, by kind of process: the load on a file system that many nodes share.

    python benchmarks/files.py --json benchmarks/results/files.json --plot benchmarks/results/files.png

Runs clusters under ``strace -ff`` (the package strace) on one node and counts until the client sees all workers. Run it with the
Python of an environment that has an MPI. ``--simulated`` starts `dask_cuda.CUDAWorker` on emulated GPUs
(tests/support/mocks; needs a C compiler), so many for each rank; ``--gpu`` on real ones; else there are CPU workers.

opened
    Calls that opened a file. Not those in /proc, /sys and /dev, and not those in the job's own temporary directory.
absent
    Calls that tried to open or inspect a file that does not exist.
looked at
    Calls that inspected a file by its name (stat, access, readlink).
listed
    Directories read.
modules
    Of the opened, compiled modules of Python: imports.

The workers of a rank are forked from a process that has imported everything: another worker must not import anything again. Exit
code 1: a worker did (the modules are named), or a cluster did not come up.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    COLOURS,
    ROOT,
    Job,
    cluster,
    default_launcher,
    drawing,
    introduce,
    machine,
    parser_for,
    save,
    write,
)

SCRIPT = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(count)
    note("ready")
    pids = lambda **more: sorted(set(client.run(os.getpid, **more).values()))
    note("roles", workers=pids(), agents=pids(nanny=True), scheduler=client.run_on_scheduler(os.getpid))
    pause()
"""
STRACE = ["strace", "-ff", "-ttt", "-qq", "-s", "4096", "-e", "signal=none", "-e"]
TRACED = "trace=%file,getdents64,clone,clone3,fork,vfork"
CALL = re.compile(
    r"^(?P<time>[\d.]+) (?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?P<error> E\w+)?"
)
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
FORKS = ("clone", "clone3", "fork", "vfork")
LOOKS = (
    "stat",
    "lstat",
    "newfstatat",
    "statx",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
)
#: Not on any disk.
KERNEL = ("/proc", "/sys", "/dev")
ROLES = ("launcher", "rank", "driver", "agent", "fork server", "scheduler", "worker")
COUNTS = ("opened", "absent", "looked at", "listed", "modules")


@dataclass
class Process:
    """What one process did.

    Attributes
    ----------
    counts : Counter
        By the words in `COUNTS`.
    modules : list of str
        Compiled modules that it opened.
    parent : int
        Process id; 0: it is not traced.
    runs : str
        Arguments of the last program that it executed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    modules: list[str] = field(default_factory=list)
    parent: int = 0
    runs: str = ""


def processes(traces: Mapping[int, Iterable[str]], until: float, scratch: str) -> dict[int, Process]:
    """Count the calls in the lines of each thread.

    Parameters
    ----------
    traces : mapping
        Lines of strace, by thread.
    until : float
        Time of the last call that counts.
    scratch : str
        Directory whose files do not count.

    Returns
    -------
    dict
        Processes by their ids.
    """
    calls = {thread: list(_calls(lines)) for thread, lines in traces.items()}
    parents: dict[int, int] = {}
    threads: dict[int, int] = {}
    for thread, found in calls.items():
        for _, name, arguments, result, _ in found:
            if name in FORKS and result > 0:
                (threads if "CLONE_THREAD" in arguments else parents)[result] = thread

    def process(thread: int) -> int:
        while thread in threads:
            thread = threads[thread]
        return thread

    everyone: dict[int, Process] = {}
    for thread, found in calls.items():
        mine = everyone.setdefault(process(thread), Process())
        if thread in parents:
            mine.parent = process(parents[thread])
        for time, name, arguments, result, error in found:
            if time > until:
                break
            _count(mine, name, arguments, result, error, scratch)
    return everyone


def _calls(lines: Iterable[str]) -> Iterator[tuple[float, str, str, int, str]]:
    for line in lines:
        if (call := CALL.match(line)) is not None:
            error = (call["error"] or "").strip()
            yield float(call["time"]), call["name"], call["arguments"], int(call["result"]), error


def _count(mine: Process, name: str, arguments: str, result: int, error: str, scratch: str) -> None:
    if name == "getdents64":
        # twice for each directory: the second finds nothing more
        mine.counts["listed"] += result == 0
        return
    quoted = QUOTED.search(arguments)
    path = quoted[1] if quoted is not None else ""
    # an empty one stands for a file that is open already
    if not path or path.startswith((*KERNEL, scratch)):
        return
    if name == "execve" and not error:
        mine.runs = arguments
    if error == "ENOENT":
        mine.counts["absent"] += 1
    if name in ("open", "openat") and not error:
        mine.counts["opened"] += 1
        if path.endswith(".pyc") or (path.endswith(".so") and "python" in path):
            mine.counts["modules"] += 1
            mine.modules.append(path)
    if name in LOOKS:
        mine.counts["looked at"] += 1


def roles(everyone: Mapping[int, Process], told: Mapping[str, Any]) -> dict[int, str]:
    """What each process is: as the script reports it, the others by their parents."""
    known = {told["scheduler"]: "scheduler"}
    for pid in told["workers"]:
        known[pid] = "worker"
        known.setdefault(everyone[pid].parent, "fork server")
    for pid in told["agents"]:
        known[pid] = "agent"
        known[everyone[pid].parent] = "rank"
    for pid, process in everyone.items():
        if pid not in known and "libcuda" in process.runs:
            known[pid] = "driver"

    def role(pid: int) -> str:
        while pid not in known and pid in everyone:
            pid = everyone[pid].parent
        return known.get(pid, "launcher")

    return {pid: role(pid) for pid in everyone}


def one(ranks: int, each: int, options: Any) -> dict[str, Any]:
    """Trace one cluster; counts by kind of process, of all, and what a worker imported."""
    variables: dict[str, object] = {}
    extra = ["--cpu-workers", str(ranks * (each - 1))]
    if options.simulated:
        variables, extra = _simulated(ranks * each, options.libdir), []
    elif options.gpu:
        variables, extra = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks * each)))}, []
    with Job(SCRIPT, ranks * each, **variables) as job:
        (job.folder / "trace").mkdir()
        traced = [*STRACE, TRACED, "-o", str(job.folder / "trace" / "t")]
        job.start([*traced, *cluster(options.launcher, ranks, "--nthreads", "1", *extra, job.script)])
        ready = job.wait("ready", limit=options.limit)
        told = job.wait("roles", limit=options.limit if ready else 0.0)
        if ready is None or told is None:
            raise RuntimeError(f"{ranks} ranks with {each} workers did not come up:\n{job.output()}")
        job.go_on()
        job.wait_for_end(options.limit)
        traces = {
            int(file.suffix[1:]): file.read_text(errors="replace").splitlines()
            for file in (job.folder / "trace").iterdir()
        }
        everyone = processes(traces, ready["time"], str(job.folder))
    kinds = roles(everyone, told)
    by_role = {}
    for role in ROLES:
        mine = [everyone[pid] for pid, kind in kinds.items() if kind == role]
        # a program that it runs, to query something, is not another of its kind
        number = sum(kinds.get(process.parent) != role for process in mine)
        by_role[role] = {"processes": number, **{key: sum(p.counts[key] for p in mine) for key in COUNTS}}
    imported = Counter(
        path for pid, kind in kinds.items() if kind == "worker" for path in everyone[pid].modules
    )
    return {
        "ranks": ranks,
        "workers_each": each,
        "host": {key: sum(row[key] for row in by_role.values()) for key in COUNTS},
        "roles": by_role,
        "imported_by_workers": dict(imported.most_common()),
    }


def _simulated(count: int, libdir: str) -> dict[str, object]:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.mocks.gpus import GIB, compile_cuda, emulated_environ, make_gpus

    gpus = make_gpus(count, host="one", memory=80 * GIB)
    return dict(emulated_environ(gpus, {"LD_LIBRARY_PATH": str(compile_cuda(Path(libdir)))}))


def growth(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What one more worker of a rank adds on the node: between the fewest and the most workers of each number of ranks.

    Less the scheduler's: it begins to import its dashboard as soon as the cluster is up; how far it gets in this time is chance.
    """
    found: dict[str, dict[str, float]] = {}
    by_ranks: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_ranks.setdefault(row["ranks"], []).append(row)
    for ranks, mine in by_ranks.items():
        few, many = min(mine, key=_each), max(mine, key=_each)
        if _each(many) > _each(few):
            added = ranks * (_each(many) - _each(few))
            found[str(ranks)] = {
                key: round((_without_scheduler(many, key) - _without_scheduler(few, key)) / added, 1)
                for key in COUNTS
            }
    return found


def _without_scheduler(row: Mapping[str, Any], key: str) -> int:
    return int(row["host"][key] - row["roles"]["scheduler"][key])


def _each(row: Mapping[str, Any]) -> int:
    return int(row["workers_each"])


def show(row: Mapping[str, Any]) -> None:
    """Print one shape's table."""
    print(f"\n{row['ranks']} rank(s) x {row['workers_each']} worker(s)")
    print(f"{'':14} {'processes':>9} {' '.join(f'{key:>9}' for key in COUNTS)}")
    for role, counts in row["roles"].items():
        if counts["processes"]:
            print(f"{role:14} {counts['processes']:9} {' '.join(f'{counts[key]:9}' for key in COUNTS)}")
    host = row["host"]
    print(f"{'the host':14} {'':9} {' '.join(f'{host[key]:9}' for key in COUNTS)}", flush=True)


def plot(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Stacks of opened and inspected files, by kind of process."""
    pyplot = drawing(file)
    if pyplot is None or file is None:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8))
    names = [f"{row['ranks']}x{row['workers_each']}" for row in rows]
    for axis, key, title in zip(
        axes,
        ("opened", "looked at"),
        ("files opened on the host", "files looked at on the host"),
        strict=True,
    ):
        under = [0] * len(rows)
        for number, role in enumerate(ROLES):
            heights = [row["roles"][role][key] for row in rows]
            axis.bar(names, heights, 0.7, bottom=under, label=role, color=COLOURS[number])
            under = [low + height for low, height in zip(under, heights, strict=True)]
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("ranks x workers")
    save(figure, file, legend=axes[0])


def main() -> int:
    """Trace all shapes, print, write."""
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="for each rank")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--simulated", action="store_true", help="GPU workers on simulated GPUs")
    which.add_argument("--gpu", action="store_true", help="GPU workers on real GPUs")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a cluster to come up")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("files.py needs strace, which is not installed here (apt-get install strace)")
    tried = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True)
    if tried.returncode:
        sys.exit(f"strace can't trace here: {tried.stderr.strip()}")
    options.launcher = default_launcher()
    workers = "simulated GPUs" if options.simulated else "GPUs" if options.gpu else "CPU workers"
    document: dict[str, Any] = {"benchmark": "files", **machine(options.launcher), "workers": workers}
    introduce(document)
    rows: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory() as options.libdir:
        for ranks in options.ranks:
            for each in options.workers:
                try:
                    rows.append(one(ranks, each, options))
                except RuntimeError as error:
                    failed = True
                    sys.stderr.write(f"{error}\n")
                    continue
                show(rows[-1])
                write(options.json, {**document, "rows": rows, "growth_per_worker": growth(rows)})
    for ranks, added in growth(rows).items():
        print(
            f"{ranks} rank(s): one more worker adds {', '.join(f'{key} {value:g}' for key, value in added.items())}"
        )
    imported = Counter[str]()
    for row in rows:
        imported.update(row["imported_by_workers"])
    for path, count in imported.most_common():
        print(f"imported after the fork, {count} times: {shlex.quote(path)}")
    if rows:
        plot(rows, options.plot)
    return int(failed or bool(imported))


if __name__ == "__main__":
    sys.exit(main())
