"""What the benchmarks share: jobs whose processes are found and ended, where they ran, results and plots."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: In the environment of every process of a job.
MARK = "DASK_GPU_MPI_BENCHMARK"
OURS = "dask_gpu_mpi"
#: Seconds for a cluster to come up, and for its processes to end by themselves.
START_LIMIT, END_LIMIT = 60.0, 10.0
PR_SET_CHILD_SUBREAPER = 36
TICK = os.sysconf("SC_CLK_TCK")
#: What a launcher is called.
LAUNCHERS = ("mpirun", "mpiexec", "prted", "prterun", "hydra_pmi_proxy", "orted", "srun")
COLOURS = ("#4477aa", "#cc6677", "#ddaa33", "#228833", "#999999", "#66ccee", "#aa3377", "#222222")

#: The beginning of every script: `note` writes into the job's folder, `pause` waits for `Job.go_on`.
HEAD = """
import json, os, sys, time
folder, count = os.environ["BENCHMARK_FOLDER"], int(os.environ["BENCHMARK_WORKERS"])
rank = next((os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if n in os.environ), "0")
def note(name, **values):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        json.dump({"time": time.time(), **values}, file)
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))
def pause():
    while not os.path.exists(os.path.join(folder, "go-on")):
        time.sleep(0.002)
"""
#: Without a scheduler, every rank by itself: ready is when the last one is.
ALONE = """
note("ready-" + rank)
pause()
note("last-" + rank)
"""


def members(mark: str) -> dict[int, tuple[int, str]]:
    """The processes with this mark: parent and command line, by process id."""
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


def kind_of(pid: int, found: Mapping[int, tuple[int, str]], scheduler: int) -> str:
    """What a process is, by its command line and its parents'."""
    parent, command = found[pid]
    above = found.get(parent, (0, ""))[1]
    if pid == scheduler:
        return "scheduler"
    if Path(command.split(" ")[0]).name in LAUNCHERS:
        return "launcher"
    if "resource_tracker" in command:
        return "tracker"
    if "libcuda" in command:
        return "driver"
    if "dask_gpu_mpi.agent.boot" in command:
        # A child has its parent's command line: agent, fork server and tracker, worker.
        if command != above:
            return "agent"
        if found.get(found[parent][0], (0, ""))[1] == command:
            return "worker"
        return "fork server" if pid in {parent for parent, _ in found.values()} else "tracker"
    if "multiprocessing.forkserver" in command:
        return "worker" if command == above else "fork server"
    if "multiprocessing.spawn" in command:
        return "worker"
    return "rank"


def by_kind(
    amounts: Mapping[int, float], found: Mapping[int, tuple[int, str]], scheduler: int
) -> dict[str, float]:
    """Sums of what processes have or take, by kind (see `kind_of`)."""
    sums: dict[str, float] = {}
    for pid, amount in amounts.items():
        kind = kind_of(pid, found, scheduler)
        sums[kind] = sums.get(kind, 0.0) + amount
    return sums


def count_kinds(found: Mapping[int, tuple[int, str]], scheduler: int) -> dict[str, int]:
    """How many processes there are of each kind (see `kind_of`)."""
    return dict(Counter(kind_of(pid, found, scheduler) for pid in found))


def cpu_of(pids: Sequence[int], *, children: bool = True) -> float:
    """CPU seconds of these processes, and of the children that they have waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11 : 15 if children else 13]))
    return total / TICK


def pss_of(pid: int) -> float:
    """Proportional set size, MiB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def become_reaper() -> None:
    """Make this process the parent of a job's orphans, so that their CPU seconds count."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for(look: Callable[[], Any], alive: Callable[[], Any], limit: float) -> Any:
    """The first result of `look` that is not None; None when nothing is alive any more, or at the timeout."""
    until = time.time() + limit
    turns = 0
    while (found := look()) is None and time.time() < until:
        time.sleep(0.005)
        turns += 1
        if turns % 200 == 0 and not alive():
            return look()
    return found


class Job:
    """Processes that belong together, in a folder of their own; none of them outlives the block.

    Parameters
    ----------
    script : str
        The script's text after `HEAD`.
    workers : int
        Workers that it waits for.
    variables
        Further variables of the environment.

    Attributes
    ----------
    cpu : float
        CPU seconds of those that have ended, as far as they were our children (see `become_reaper`).
    """

    def __init__(self, script: str = "", workers: int = 0, **variables: object) -> None:
        self.mark = uuid.uuid4().hex
        # names of sockets are short
        self.folder = Path(tempfile.mkdtemp(prefix="bm-"))
        (self.folder / "t").mkdir()
        self.script = self.folder / "script.py"
        self.script.write_text(HEAD + script)
        self.environ = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.folder / "t"),
            # what is measured is this checkout
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "BENCHMARK_FOLDER": str(self.folder),
            "BENCHMARK_WORKERS": str(workers),
            **{name: str(value) for name, value in variables.items()},
        }
        self.cpu = 0.0
        self.started = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self.reap()
        self.cpu = 0.0

    def __enter__(self) -> Job:
        return self

    def start(self, *lines: Sequence[str]) -> None:
        """Start these command lines together."""
        self.started = time.time()
        with open(self.folder / "out", "ab") as out:
            for line in lines:
                self._processes.append(
                    subprocess.Popen(
                        line,
                        env=self.environ,
                        stdout=out,
                        stderr=out,
                        stdin=subprocess.DEVNULL,
                        cwd=self.folder,
                    )
                )

    def members(self) -> dict[int, tuple[int, str]]:
        """The processes of this job: parent and command line, by process id."""
        return members(self.mark)

    def read(self, name: str, ranks: int = 0) -> dict[str, Any] | None:
        """What the script, or each of `ranks` ranks, has noted; the latest time of all."""
        names = [name] if ranks == 0 else [f"{name}-{rank}" for rank in range(ranks)]
        if not all((self.folder / each).exists() for each in names):
            return None
        notes = [json.loads((self.folder / each).read_text()) for each in names]
        return {**notes[0], "time": max(note["time"] for note in notes)}

    def wait(self, name: str, ranks: int = 0, limit: float = START_LIMIT) -> dict[str, Any] | None:
        """The first result of `read` that is not None; None when all have ended, or at the timeout."""
        found: dict[str, Any] | None = wait_for(lambda: self.read(name, ranks), self.members, limit)
        return found

    def go_on(self) -> None:
        """End the script's pause."""
        (self.folder / "go-on").touch()

    def wait_for_end(self, limit: float = END_LIMIT) -> bool:
        """Whether all processes have ended by themselves."""
        until = time.time() + limit
        # one that is ending has no environment any more, but no exit code yet
        while self.members() or any(process.pid not in self._codes for process in self._processes):
            if time.time() > until:
                return False
            self.reap()
            time.sleep(0.02)
        return True

    def reap(self) -> None:
        """Reap the children that have ended, and add up their CPU seconds."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                self.cpu += usage.ru_utime + usage.ru_stime
                self._codes[pid] = os.waitstatus_to_exitcode(status)

    @property
    def code(self) -> int | None:
        """Exit code of the first command line; None: it has not ended."""
        self.reap()
        return self._codes.get(self._processes[0].pid)

    def output(self, characters: int = 1500) -> str:
        """The end of its output."""
        file = self.folder / "out"
        return file.read_text(errors="replace")[-characters:] if file.exists() else ""

    def kill(self) -> None:
        """End what is left."""
        until = time.time() + END_LIMIT
        while (left := self.members()) and time.time() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            self.reap()

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        shutil.rmtree(self.folder, ignore_errors=True)


class Peak:
    """A job's memory, sampled in a thread; that takes CPU time, so no run that is timed has one.

    Attributes
    ----------
    looks : int
        How often it was looked at.
    """

    EVERY = 0.05  # seconds between two samples

    def __init__(self, job: Job) -> None:
        self.looks = 0
        self._job = job
        self._found: dict[int, tuple[int, str]] = {}
        self._sizes: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self.EVERY):
            found = self._job.members()
            sizes = {pid: pss_of(pid) for pid in found}
            self.looks += 1
            if sum(sizes.values()) > sum(self._sizes.values()):
                self._found, self._sizes = found, sizes

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(END_LIMIT)

    def by_kind(self, scheduler: int) -> dict[str, float]:
        """The proportional set sizes, MiB, of the sample with the largest sum, by kind of process (see `kind_of`)."""
        return by_kind(self._sizes, self._found, scheduler)


def default_launcher() -> list[str]:
    """The mpirun of this environment, with what it needs on a small machine, and as root in a container."""
    if os.geteuid() == 0:
        os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    if not Path(mpirun).exists():
        sys.exit(f"no {mpirun}: run this with the Python of an environment that has an MPI")
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    return [mpirun, *(["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said else [])]


def cluster(launcher: Sequence[str], ranks: int, *words: str | Path) -> list[str]:
    """The command line of dask_gpu_mpi's cluster: options, the script, its arguments. No launcher: by `launch`."""
    ours = [sys.executable, "-m", OURS]
    if not launcher:
        return [*ours, "launch", "-n", str(ranks), *map(str, words)]
    return [*launcher, "-np", str(ranks), *ours, *map(str, words)]


def has(package: str) -> bool:
    """Whether a distribution is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def machine(launcher: Sequence[str]) -> dict[str, Any]:
    """Where this runs."""
    said = subprocess.run([launcher[0], "--version"], capture_output=True, text=True).stdout
    lines = said.strip().splitlines() or [launcher[0]]
    mpi = f"MPICH {said.split('Version:')[1].split()[0]}" if "HYDRA" in lines[0] else lines[0]
    names = (
        "dask-gpu-mpi",
        "distributed",
        "dask-mpi",
        "dask-jobqueue",
        "dask-cuda",
        "mpi4py",
        "cryptography",
    )
    return {
        "command": shlex.join(sys.argv),
        "mpi": mpi,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        # without them every process that imports compiles: half of a start (PYTHONDONTWRITEBYTECODE)
        "writes .pyc": not sys.dont_write_bytecode,
        "versions": {name: version(name) for name in names if has(name)},
        "load": round(os.getloadavg()[0], 2),
    }


def introduce(where: Mapping[str, Any]) -> None:
    """Print where this runs."""
    print(", ".join(f"{name} {text}" for name, text in where.items() if name != "command"), flush=True)


def middle(values: Sequence[float | None]) -> float | None:
    """The median of the values that are not None."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a plot of them; needs matplotlib")
    return parser


def write(file: Path | None, document: Mapping[str, Any]) -> None:
    """Write the results, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n")


def drawing(file: Path | None) -> Any:
    """Pyplot, if a plot is wanted and matplotlib is installed; else None, with a line if matplotlib is missing."""
    if file is None:
        return None
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"no {file}: matplotlib is not installed here (pip install matplotlib)")
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    return pyplot


def bars(axis: Any, groups: Mapping[str, Mapping[str, float | None]], title: str) -> None:
    """Bars side by side for each group; a configuration has the same colour in all groups, and a cross where it has no value."""
    ways = list(dict.fromkeys(way for row in groups.values() for way in row))
    width = 0.84 / max(1, len(ways))
    for number, way in enumerate(ways):
        places = [place + number * width for place in range(len(groups))]
        heights = [row.get(way) for row in groups.values()]
        colour = COLOURS[number % len(COLOURS)]
        drawn = axis.bar(places, [height or 0.0 for height in heights], width * 0.92, label=way, color=colour)
        if len(groups) * len(ways) <= 14:
            axis.bar_label(drawn, [f"{height:.3g}" if height else "" for height in heights], fontsize=7)
        missing = [
            place
            for place, row in zip(places, groups.values(), strict=True)
            if way in row and row[way] is None
        ]
        if missing:
            axis.plot(missing, [0.0] * len(missing), "x", color=colour)
    axis.set_xticks([place + 0.42 - width / 2 for place in range(len(groups))], list(groups))
    axis.set_title(title, fontsize=10, loc="left")
    axis.margins(y=0.12)


def save(figure: Any, file: Path, *, legend: Any = None) -> None:
    """Write the plot; over it the legend of one of its axes."""
    figure.tight_layout(rect=(0, 0, 1, 1 if legend is None else 1 - 0.35 / figure.get_figheight()))
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    print(f"plot: {file}")
