"""How long a cluster takes to come up and to go, what that costs, and how other ways to start one compare.

    python benchmarks/startup.py --ranks 1 2 4 --workers 1 2 4 --rounds 5 --json benchmarks/results/startup.json

Run it with the Python of an environment that has an MPI and the peers (dask-mpi, dask-cuda): that MPI's mpirun is used.
A shape is a number of ranks and of workers for each; a round starts every way once, one after the other, in an order that
changes from round to round; ratios are taken within a round. ``--gpu`` starts GPU workers, one on each of the first
ranks * workers GPUs.

Times are wall-clock seconds: from the start of the launcher until the client sees all workers, and from the last line of the
script until everything has exited. CPU seconds are those of all processes of a job: until it is ready, and altogether. Memory is
the sum of their proportional set sizes (PSS: shared pages count once) when it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "DASK_GPU_MPI_STARTUP"
PR_SET_CHILD_SUBREAPER = 36
TICK = os.sysconf("SC_CLK_TCK")
#: Seconds for a cluster to come up, and for its processes to end by themselves.
START_LIMIT, END_LIMIT = 60.0, 12.0
OURS, PEER = "dask_gpu_mpi", "dask-mpi"

HEAD = """
import json, os, sys, time
folder, count = os.environ["STARTUP_FOLDER"], int(os.environ["STARTUP_WORKERS"])
def note(name, value):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        json.dump(value, file)
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))
"""
CLIENT = """
    client.wait_for_workers(count)
    ready = time.time()
    note("ready", {"time": ready, "scheduler": client.run_on_scheduler(os.getpid)})
    while not os.path.exists(os.path.join(folder, "go-on")):
        time.sleep(0.002)
"""
LAST = '\n    note("last", {"time": time.time()})\n'
#: Without a scheduler, every rank by itself: ready is when the last one is.
ALONE = """
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
note("ready-" + rank, {"time": time.time()})
while not os.path.exists(os.path.join(folder, "go-on")):
    time.sleep(0.002)
note("last-" + rank, {"time": time.time()})
"""
SCRIPTS = {
    OURS: "if True:\n    from distributed import Client\n    with Client() as client:\n"
    + CLIENT.replace("\n    ", "\n        ")
    + LAST,
    PEER: """
if __name__ == "__main__":
    from distributed import Client
    from dask_mpi import initialize
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    each = int(os.environ["STARTUP_EACH"])
    if os.environ["STARTUP_GPU"] == "1":
        if rank >= 2:
            devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[(rank - 2) * each : (rank - 1) * each])
        initialize(worker_class="dask_cuda.CUDAWorker", nthreads=1)
    else:
        initialize(worker_class="distributed.Nanny", nthreads=1)
    with Client() as client:
"""
    + CLIENT.replace("\n    ", "\n        ")
    + LAST,
    "LocalCluster": """
if __name__ == "__main__":
    from distributed import Client
    if os.environ["STARTUP_GPU"] == "1":
        from dask_cuda import LocalCUDACluster
        cluster = LocalCUDACluster()
    else:
        from distributed import LocalCluster
        cluster = LocalCluster(n_workers=count, threads_per_worker=1)
    with cluster, Client(cluster) as client:
"""
    + CLIENT.replace("\n    ", "\n        ")
    + LAST,
    "dask worker": """
if True:
    from distributed import Client
    with Client(scheduler_file=os.path.join(folder, "scheduler.json")) as client:
"""
    + CLIENT.replace("\n    ", "\n        ")
    + "\n        client.shutdown()\n"
    + LAST,
    "limit": """
import distributed, distributed.nanny, distributed.worker, distributed.scheduler
if os.environ["STARTUP_GPU"] == "1":
    import dask_cuda
    from numba import cuda
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]
    cuda.current_context()
from mpi4py import MPI
"""
    + ALONE,
    "empty MPI": "\nfrom mpi4py import MPI\n" + ALONE,
}
#: What a launcher is called.
LAUNCHERS = ("mpirun", "mpiexec", "prted", "prterun", "hydra_pmi_proxy", "orted")


@dataclass
class Run:
    """One cluster, or one program that stands for a limit.

    Attributes
    ----------
    ready_s, end_s : float or None
        Until all workers are there; from the last line of the script to the end of everything. None: it did not come to that.
    cpu_ready_s, cpu_s : float or None
        CPU seconds of all processes until then, and altogether.
    pss_mib : dict
        Proportional set size when ready, by kind of process.
    processes : dict
        Their number.
    killed : bool
        It did not end by itself.
    """

    way: str
    round: int
    ready_s: float | None = None
    end_s: float | None = None
    cpu_ready_s: float | None = None
    cpu_s: float | None = None
    pss_mib: dict[str, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    killed: bool = False
    load: float = 0.0

    @property
    def pss_total(self) -> float | None:
        """Of all kinds of processes, MiB."""
        return sum(self.pss_mib.values()) or None


def members(mark: str) -> dict[int, tuple[int, str]]:
    """The job's processes: parent and command line, by process id."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if needle in (entry / "environ").read_bytes():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = (int(fields[1]), command)
    return found


def kind_of(pid: int, found: dict[int, tuple[int, str]], scheduler: int) -> str:
    """What a process is, by its command line and its parents'."""
    parent, command = found[pid]
    above = found.get(parent, (0, ""))[1]
    if pid == scheduler:
        return "scheduler"
    if Path(command.split(" ")[0]).name in LAUNCHERS:
        return "launcher"
    if "resource_tracker" in command:
        return "tracker"
    if "dask_gpu_mpi.agent" in command:
        # A child has its parent's command line: agent, fork server, worker.
        if command != above:
            return "agent"
        return "worker" if found.get(found[parent][0], (0, ""))[1] == command else "fork server"
    if "multiprocessing.forkserver" in command:
        return "worker" if command == above else "fork server"
    if "multiprocessing.spawn" in command:
        return "worker"
    return "rank"


def cpu_of(pids: Sequence[int]) -> float:
    """CPU seconds of these processes and of the children that they have waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / TICK


def pss_of(pid: int) -> float:
    """Proportional set size, MiB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def reap() -> float:
    """CPU seconds of all our children that have ended since, orphans of the job among them (we are their reaper)."""
    total = 0.0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            total += usage.ru_utime + usage.ru_stime
    return total


def read(folder: Path, name: str, ranks: int) -> dict[str, Any] | None:
    """What the script, or each of `ranks` ranks, has noted; the latest time of all."""
    names = [name] if ranks == 0 else [f"{name}-{rank}" for rank in range(ranks)]
    if not all((folder / each).exists() for each in names):
        return None
    notes = [json.loads((folder / each).read_text()) for each in names]
    return {**notes[0], "time": max(note["time"] for note in notes)}


def commands(way: str, script: Path, folder: Path, shape: tuple[int, int], options: Any) -> list[list[str]]:
    """The command lines that start a cluster: one, but for the scheduler file's."""
    ranks, each = shape
    python = sys.executable
    if way == OURS:
        extra = [] if options.gpu else ["--cpu-workers", str(ranks * (each - 1))]
        extra += options.ours
        return [[*options.launcher, "-np", str(ranks), python, "-m", OURS, *extra, str(script)]]
    if way == PEER:
        # It starts one CPU worker on each rank, and keeps two ranks for scheduler and client.
        workers = ranks if options.gpu else ranks * each
        return [[*options.launcher, "-np", str(workers + 2), python, str(script)]]
    if way in ("limit", "empty MPI"):
        return [[*options.launcher, "-np", str(ranks), python, str(script)]]
    if way == "dask worker":
        file = str(folder / "scheduler.json")
        dask = [python, "-m", "dask"]
        workers = ["--nworkers", str(ranks * each), "--nthreads", "1"]
        return [
            [
                *dask,
                "scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--no-dashboard",
                "--scheduler-file",
                file,
            ],
            [*dask, "cuda", "worker", "--scheduler-file", file]
            if options.gpu
            else [*dask, "worker", "--scheduler-file", file, *workers],
            [python, str(script)],
        ]
    return [[python, str(script)]]


def run_one(way: str, shape: tuple[int, int], number: int, options: Any) -> Run:
    """Start one cluster, look at it when it is ready, and let it end."""
    ranks, each = shape
    run = Run(way, number, load=os.getloadavg()[0])
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    script = folder / "script.py"
    script.write_text(HEAD + SCRIPTS[way])
    (folder / "t").mkdir()
    environ = {
        **os.environ,
        MARK: mark,
        "TMPDIR": str(folder / "t"),
        "STARTUP_FOLDER": str(folder),
        "STARTUP_WORKERS": str(ranks * each),
        "STARTUP_EACH": str(each),
        "STARTUP_GPU": str(int(options.gpu)),
    }
    if options.gpu:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks * each)))
    noting = ranks if way in ("limit", "empty MPI") else 0
    reap()
    cpu = 0.0
    started = time.time()
    with open(folder / "out", "wb") as out:
        for line in commands(way, script, folder, shape, options):
            subprocess.Popen(line, env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder)
    ready = wait_for(lambda: read(folder, "ready", noting), mark, START_LIMIT)
    if ready is not None:
        run.ready_s = ready["time"] - started
        found = members(mark)
        run.cpu_ready_s = cpu_of(list(found))
        for pid in found:
            kind = kind_of(pid, found, ready.get("scheduler", 0))
            run.pss_mib[kind] = run.pss_mib.get(kind, 0.0) + pss_of(pid)
            run.processes[kind] = run.processes.get(kind, 0) + 1
        (folder / "go-on").touch()
        last = wait_for(lambda: read(folder, "last", noting), mark, START_LIMIT)
        limit = time.time() + END_LIMIT
        while (left := members(mark)) and time.time() < limit:
            cpu += reap()
            time.sleep(0.01)
        if last is not None and not left:
            run.end_s = time.time() - last["time"]
    run.killed = bool(members(mark))
    while left := members(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    time.sleep(0.05)
    run.cpu_s = cpu + reap()
    if run.ready_s is None or (run.killed and way in (OURS, "limit", "empty MPI")):
        sys.stderr.write(f"--- {way} {shape}\n{(folder / 'out').read_text(errors='replace')[-1500:]}\n")
    shutil.rmtree(folder, ignore_errors=True)
    return run


def wait_for(look: Callable[[], Any], mark: str, limit: float) -> Any:
    """What `look` gives, once it does; None when all have ended, or it takes too long."""
    until = time.time() + limit
    turns = 0
    while (found := look()) is None and time.time() < until:
        time.sleep(0.005)
        turns += 1
        if turns % 200 == 0 and not members(mark):
            return look()
    return found


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what there is."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


COLUMNS = ("ready_s", "end_s", "cpu_ready_s", "cpu_s", "pss_total")


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians of each way, and ours as a ratio of the same round's peers."""
    result: dict[str, Any] = {}
    ours = {run.round: run for run in runs if run.way == OURS}
    for way in dict.fromkeys(run.way for run in runs):
        mine = [run for run in runs if run.way == way]
        row: dict[str, Any] = {column: middle([getattr(run, column) for run in mine]) for column in COLUMNS}
        row["killed"] = sum(run.killed for run in mine)
        row["runs"] = len(mine)
        kinds = dict.fromkeys(kind for run in mine for kind in run.pss_mib)
        row["pss_mib"] = {kind: middle([run.pss_mib.get(kind) for run in mine]) for kind in kinds}
        row["processes"] = mine[-1].processes
        if way != OURS:
            row["ours_over_this"] = {
                column: middle(
                    [
                        getattr(ours[run.round], column) / value
                        for run in mine
                        if run.round in ours
                        and (value := getattr(run, column))
                        and getattr(ours[run.round], column)
                    ]
                )
                for column in COLUMNS
            }
        result[way] = row
    return result


def show(shape: tuple[int, int], rows: dict[str, Any]) -> None:
    """Print one shape's table."""
    print(f"\n{shape[0]} rank(s) x {shape[1]} worker(s); in brackets: ours as a ratio of this, within rounds")
    print(f"{'':14} {'ready s':>15} {'end s':>15} {'CPU s ready':>15} {'CPU s':>15} {'PSS MiB':>15} killed")
    for way, row in rows.items():
        cells = []
        for column in COLUMNS:
            ratio = row.get("ours_over_this", {}).get(column)
            value = "-" if row[column] is None else f"{row[column]:.2f}"
            cells.append(f"{value}{f' ({ratio:.2f})' if ratio else '':>7}")
        print(f"{way:14} {' '.join(f'{cell:>15}' for cell in cells)} {row['killed']}/{row['runs']}")
    sys.stdout.flush()


def plot(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Bars of the seconds to ready and to the end, where matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    ways = list(dict.fromkeys(way for rows in results.values() for way in rows))
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for axis, column, title in zip(
        axes,
        ("ready_s", "cpu_s", "pss_total"),
        ("launch to all workers, s", "CPU seconds of the job", "memory, PSS, MiB"),
        strict=True,
    ):
        for number, way in enumerate(ways):
            heights = [(rows.get(way) or {}).get(column) or 0.0 for rows in results.values()]
            places = [place + number / (len(ways) + 1) for place in range(len(results))]
            axis.bar(places, heights, 1 / (len(ways) + 1), label=way)
        axis.set_xticks([place + 0.4 for place in range(len(results))], list(results))
        axis.set_title(title)
        axis.set_xlabel("ranks x workers")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def default_launcher() -> list[str]:
    """The mpirun of this environment, with what it needs on a small machine, and as root in a container."""
    if os.geteuid() == 0:
        os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    return [mpirun, *(["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said else [])]


def machine(launcher: Sequence[str]) -> dict[str, Any]:
    """Where this ran."""
    said = subprocess.run([launcher[0], "--version"], capture_output=True, text=True).stdout
    versions = {}
    for name in ("dask-gpu-mpi", "distributed", "dask-mpi", "dask-cuda", "mpi4py"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "mpi": said.strip().splitlines()[0] if said else launcher[0],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> int:
    """Run all shapes and print their tables; exit code 1 when a cluster of ours did not come up or had to be killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="for each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--gpu", action="store_true", help="GPU workers")
    parser.add_argument("--mpirun", help="launcher with its options; default: the one beside this Python")
    parser.add_argument("--ours", default="", help="further options of dask_gpu_mpi, as one text")
    parser.add_argument("--most", type=int, default=1 << 30, help="leave out shapes with more workers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG")
    options = parser.parse_args()
    options.ours = options.ours.split()
    if options.mpirun:
        options.launcher = options.mpirun.split()
    else:
        options.launcher = default_launcher()
    # orphans of a job come to us, with what they have cost
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    where = machine(options.launcher)
    print(", ".join(f"{name} {text}" for name, text in where.items()))
    results: dict[str, dict[str, Any]] = {}
    everything: dict[str, list[dict[str, Any]]] = {}
    wrong = 0
    for ranks in options.ranks:
        for each in options.workers:
            if ranks * each > options.most:
                continue
            runs: list[Run] = []
            for number in range(options.rounds):
                turn = number % len(options.ways)
                for way in (*options.ways[turn:], *options.ways[:turn]):
                    runs.append(run_one(way, (ranks, each), number, options))
            wrong += sum(run.way == OURS and (run.ready_s is None or run.killed) for run in runs)
            runs.sort(key=lambda run: (options.ways.index(run.way), run.round))
            results[f"{ranks}x{each}"] = summary(runs)
            everything[f"{ranks}x{each}"] = [asdict(run) for run in runs]
            show((ranks, each), results[f"{ranks}x{each}"])
            if options.json:
                document = {
                    "benchmark": "startup",
                    **where,
                    "gpu": options.gpu,
                    "results": results,
                    "runs": everything,
                }
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
