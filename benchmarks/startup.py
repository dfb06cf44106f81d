"""Seconds, CPU seconds and memory of the start and the end of a cluster, against other ways to start one.

    python benchmarks/startup.py --json benchmarks/results/startup.json --plot benchmarks/results/startup.png

Run it with the Python of an environment that has an MPI and the peers (dask-mpi, dask-cuda): that MPI's mpirun is used. A shape
is a number of ranks and of workers for each. A trial (``--rounds``) starts every configuration (``--ways``) once, in an order
that changes from trial to trial; ratios are taken within a trial. ``--gpu`` starts GPU workers, one on each of the first ranks
* workers GPUs. A configuration that fails, or exceeds the timeout, is noted as a failure; after two in one shape it is skipped
there.

Times are wall-clock seconds: from the start of the launcher until the client sees all workers; and from the last line of the
script, after which it closes its client and its cluster, until everything has exited: whole, and less what an MPI program that
does nothing takes for that in the same trial. CPU seconds are those of all processes of a job: until it is ready, and in total.
Memory is the sum of their proportional set sizes (PSS: shared pages count once) when it is ready, and its peak: the largest of
twenty samples a second, in runs of their own (``--peaks``), whose times do not count.

The baseline ("limit" in the results) is an MPI program that imports what a worker needs and, with ``--gpu``, makes one context:
as Open MPI starts it and ("quick MPI") without the second that Open MPI sleeps in ``MPI_Init`` on nodes without a fast network
(see `dask_gpu_mpi.mpi.library`).

``--checkout before=FOLDER`` adds another checkout of this project, interleaved with this one: the effect of a change on the
start is the ratio within trials. ``--launch`` starts both by their ``launch -n``, not by mpirun.

Exit code 1: a cluster of dask_gpu_mpi did not come up, or had to be killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import (
    ALONE,
    END_LIMIT,
    OURS,
    START_LIMIT,
    Job,
    Peak,
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

PEER, EMPTY = "dask-mpi", "empty MPI"
LIMIT, LEAST = "limit", "limit, quick MPI"
#: MPI programs without a scheduler, of which each rank notes for itself.
LIMITS = (LIMIT, LEAST, EMPTY)
FAILURES = 2
CLIENT = """
    client.wait_for_workers(count)
    note("ready", scheduler=client.run_on_scheduler(os.getpid))
    pause()
    note("last")
"""
#: A client of a running cluster.
CONNECT = "if True:\n    from distributed import Client\n    with Client() as client:\n" + CLIENT.replace(
    "\n    ", "\n        "
)
#: What a worker needs: imports, and a CUDA context.
NEEDED = """
import distributed, distributed.nanny, distributed.worker, distributed.scheduler
if os.environ["STARTUP_GPU"] == "1":
    import dask_cuda
    from numba import cuda
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]
    cuda.current_context()
"""
#: What some configurations are with GPU workers.
GPU_NAMES = {"LocalCluster": "LocalCUDACluster", "dask worker": "dask cuda worker"}
SCRIPTS = {
    OURS: CONNECT,
    PEER: """
if __name__ == "__main__":
    from distributed import Client
    from dask_mpi import initialize
    rank = int(rank)
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
    + CLIENT.replace("\n    ", "\n        "),
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
    + CLIENT.replace("\n    ", "\n        "),
    "dask worker": """
if True:
    from distributed import Client
    with Client(scheduler_file=os.path.join(folder, "scheduler.json")) as client:
"""
    + CLIENT.replace("\n    ", "\n        ")
    + "\n        client.shutdown()\n",
    LIMIT: NEEDED + "\nfrom mpi4py import MPI\n" + ALONE,
    LEAST: NEEDED + "\nfrom dask_gpu_mpi.mpi.library import load_mpi\nload_mpi(os.environ, '')\n" + ALONE,
    EMPTY: "\nfrom mpi4py import MPI\n" + ALONE,
}


@dataclass
class Run:
    """One cluster, or one program that is a baseline.

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
    watched : bool
        Its memory was looked at all the time, so its times do not count.
    peak_mib : dict
        Of a run that was watched: proportional set size when the sum was largest, by kind of process.
    killed : bool
        It did not end by itself.
    failure : str
        Why it did not come up, or that it was killed; empty: all went well.
    """

    way: str
    round: int
    ready_s: float | None = None
    end_s: float | None = None
    cpu_ready_s: float | None = None
    cpu_s: float | None = None
    pss_mib: dict[str, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    watched: bool = False
    peak_mib: dict[str, float] = field(default_factory=dict)
    killed: bool = False
    failure: str = ""
    load: float = 0.0

    @property
    def pss_total(self) -> float | None:
        """Of all kinds of processes, MiB."""
        return sum(self.pss_mib.values()) or None

    @property
    def peak_total(self) -> float | None:
        """Of all kinds of processes, MiB."""
        return sum(self.peak_mib.values()) or None


def commands(way: str, job: Job, shape: tuple[int, int], options: Any) -> list[list[str]]:
    """The command lines that start a cluster: one, but for the scheduler file's."""
    ranks, each = shape
    python, script = sys.executable, str(job.script)
    if way == OURS or way in options.checkout or way in options.other:
        extra = [] if options.gpu else ["--cpu-workers", str(ranks * (each - 1))]
        launcher = [] if options.launch else options.launcher
        return [cluster(launcher, ranks, *extra, *options.ours, *options.other.get(way, []), script)]
    if way == PEER:
        # It starts one CPU worker on each rank, and keeps two ranks for scheduler and client.
        number = (ranks if options.gpu else ranks * each) + 2
        return [[*options.launcher, "-np", str(number), python, script]]
    if way in LIMITS:
        return [[*options.launcher, "-np", str(ranks), python, script]]
    if way == "dask worker":
        file = ["--scheduler-file", str(job.folder / "scheduler.json")]
        dask = [python, "-m", "dask"]
        workers = ["worker", *file, "--nworkers", str(ranks * each), "--nthreads", "1"]
        return [
            [*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", *file],
            [*dask, *(["cuda", "worker", *file] if options.gpu else workers)],
            [python, script],
        ]
    return [[python, script]]


def measure(run: Run, job: Job, lines: Sequence[Sequence[str]], ranks: int, limit: float) -> None:
    """Start a job, measure it when it is ready, let it end, and measure that; `ranks` that note for themselves, or 0."""
    with contextlib.ExitStack() as stack:
        peak = stack.enter_context(Peak(job)) if run.watched else None
        ready = follow(run, job, lines, ranks, limit)
    if peak is not None and ready is not None:
        run.peak_mib = peak.by_kind(ready.get("scheduler", 0))
    if run.failure:
        sys.stderr.write(f"--- {run.way}: {run.failure}\n{job.output()}\n")


def follow(
    run: Run, job: Job, lines: Sequence[Sequence[str]], ranks: int, limit: float
) -> dict[str, Any] | None:
    """The same, less the memory in between; what the script has noted when it was ready."""
    job.start(*lines)
    ready = job.wait("ready", ranks, limit)
    ended = True
    if ready is None:
        run.failure = f"not ready after {time.time() - job.started:.0f} s"
    else:
        run.ready_s = ready["time"] - job.started
        found = job.members()
        run.cpu_ready_s = cpu_of(list(found))
        scheduler = ready.get("scheduler", 0)
        run.pss_mib = by_kind({pid: pss_of(pid) for pid in found}, found, scheduler)
        run.processes = count_kinds(found, scheduler)
        job.go_on()
        last = job.wait("last", ranks, limit)
        ended = job.wait_for_end(END_LIMIT)
        if ended and last is not None:
            run.end_s = time.time() - last["time"]
    if not ended or job.members():
        run.killed = True
        run.failure = run.failure or "did not end by itself"
        job.kill()
    job.reap()
    if ready is not None:
        run.cpu_s = job.cpu
    return ready


def run_one(way: str, shape: tuple[int, int], number: int, options: Any) -> Run:
    """Start one cluster, measure it when it is ready, and let it end; after the timed trials sample its memory throughout."""
    ranks, each = shape
    run = Run(way, number, load=os.getloadavg()[0], watched=number >= options.rounds)
    variables: dict[str, object] = {"STARTUP_EACH": each, "STARTUP_GPU": int(options.gpu)}
    if way in options.checkout:
        variables["PYTHONPATH"] = options.checkout[way]
    if options.gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks * each)))
    try:
        with Job(SCRIPTS.get(way, CONNECT), ranks * each, **variables) as job:
            measure(
                run, job, commands(way, job, shape, options), ranks if way in LIMITS else 0, options.limit
            )
    except OSError as error:
        run.failure = str(error)
    return run


def in_turn(ways: Sequence[str], rounds: int, one: Callable[[str, int], Run]) -> list[Run]:
    """Each configuration once in each trial, in an order that changes; without those that keep failing."""
    runs: list[Run] = []
    for number in range(rounds):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            if sum(bool(run.failure) for run in runs if run.way == way) < FAILURES:
                runs.append(one(way, number))
    return sorted(runs, key=lambda run: (ways.index(run.way), run.round))


COLUMNS = ("ready_s", "end_s", "cpu_ready_s", "cpu_s", "pss_total", "peak_total")


def value_of(run: Run, column: str) -> float | None:
    """The value of a run; of one whose memory was sampled throughout only the peak counts, which no other has."""
    if run.watched and column != "peak_total":
        return None
    value: float | None = getattr(run, column)
    return value


def summary(runs: Sequence[Run], *, ours: str = OURS) -> dict[str, Any]:
    """Medians of each configuration, and dask_gpu_mpi as a ratio of the others, within trials."""
    result: dict[str, Any] = {}
    own = {run.round: run for run in runs if run.way == ours}
    empty = {
        run.round: run.end_s for run in runs if run.way == EMPTY and run.end_s is not None and not run.watched
    }
    for way in dict.fromkeys(run.way for run in runs):
        mine = [run for run in runs if run.way == way]
        timed = [run for run in mine if not run.watched]
        row: dict[str, Any] = {column: middle([value_of(run, column) for run in mine]) for column in COLUMNS}
        row["end_beyond_empty_s"] = middle(
            [
                run.end_s - empty[run.round]
                for run in timed
                if run.round in empty and run.end_s is not None and way != EMPTY
            ]
        )
        row["killed"] = sum(run.killed for run in mine)
        row["failures"] = [run.failure for run in mine if run.failure]
        row["runs"] = len(timed)
        row["watched"] = len(mine) - len(timed)
        kinds = dict.fromkeys(kind for run in timed for kind in run.pss_mib)
        row["pss_mib"] = {kind: middle([run.pss_mib.get(kind) for run in timed]) for kind in kinds}
        kinds = dict.fromkeys(kind for run in mine for kind in run.peak_mib)
        row["peak_mib"] = {kind: middle([run.peak_mib.get(kind) for run in mine]) for kind in kinds}
        row["processes"] = mine[-1].processes
        if way != ours:
            row["ours_over_this"] = {
                column: middle(
                    [
                        mark / value
                        for run in mine
                        if run.round in own
                        and (value := value_of(run, column))
                        and (mark := value_of(own[run.round], column))
                    ]
                )
                for column in COLUMNS
            }
        result[way] = row
    return result


def show(title: str, rows: Mapping[str, Any]) -> None:
    """Print one shape's table."""
    print(
        f"\n{title}; in brackets: ours as a ratio of this, within rounds; beyond: end less that of an empty MPI"
    )
    heads = ("ready s", "end s", "CPU s ready", "CPU s", "PSS MiB", "peak MiB")
    print(f"{'':20} {' '.join(f'{head:>15}' for head in heads)} {'beyond s':>9} failed")
    for way, row in rows.items():
        cells = []
        for column in COLUMNS:
            ratio = row.get("ours_over_this", {}).get(column)
            value = "-" if row[column] is None else f"{row[column]:.2f}"
            cells.append(f"{value}{f' ({ratio:.2f})' if ratio else '':>7}")
        beyond = row["end_beyond_empty_s"]
        print(
            f"{way:20} {' '.join(f'{cell:>15}' for cell in cells)} {'-' if beyond is None else f'{beyond:.2f}':>9} "
            f"{len(row['failures'])}/{row['runs'] + row['watched']}"
        )
    sys.stdout.flush()


def plot(results: Mapping[str, Mapping[str, Any]], file: Path | None, *, groups: str) -> None:
    """Bars of seconds, CPU seconds and memory, group by group."""
    pyplot = drawing(file)
    if pyplot is None or file is None:
        return
    panels = {
        "ready_s": "launch to all workers, s",
        "end_s": "script's last line to the end of everything, s",
        "cpu_s": "CPU seconds of the job",
        "pss_total": "memory when ready, PSS, MiB",
        "peak_total": "peak of the memory, PSS, MiB",
    }
    known = [
        column for column in panels if any(row[column] for rows in results.values() for row in rows.values())
    ]
    wide = sum(map(len, results.values())) > 24
    across = 1 if wide else 2
    down = -(-len(known) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(11, 2.7 * down + 0.4), squeeze=False)
    for axis, column in zip(axes.flat, known, strict=False):
        bars(
            axis,
            {name: {way: row[column] for way, row in rows.items()} for name, rows in results.items()},
            panels[column],
        )
        axis.set_xlabel(groups)
    for axis in axes.flat[len(known) :]:
        axis.set_visible(False)
    save(figure, file, legend=axes.flat[0])


def main() -> int:
    """Run all shapes and print their tables."""
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="for each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peaks", type=int, default=1, help="rounds more in which the memory is looked at all the time"
    )
    parser.add_argument("--ways", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--without", nargs="+", choices=list(SCRIPTS), default=[], help="ways to leave out")
    parser.add_argument(
        "--checkout",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="other checkouts of this project, each measured beside this one",
    )
    parser.add_argument(
        "--other",
        nargs="+",
        default=[],
        metavar="NAME=OPTIONS",
        help="other options of dask_gpu_mpi, each measured beside it: 'tls=--protocol tls'",
    )
    parser.add_argument("--gpu", action="store_true", help="GPU workers")
    parser.add_argument(
        "--launch", action="store_true", help="dask_gpu_mpi's clusters by its command launch, not by mpirun"
    )
    parser.add_argument("--mpirun", help="launcher with its options; default: the one beside this Python")
    parser.add_argument("--ours", default="", help="further options of dask_gpu_mpi, as one text")
    parser.add_argument("--most", type=int, default=1 << 30, help="leave out shapes with more workers")
    parser.add_argument(
        "--most-peers", type=int, default=1 << 30, help="the other ways only in shapes with so many workers"
    )
    parser.add_argument(
        "--limit", type=float, default=START_LIMIT, help="seconds for a cluster to come up (%(default)g)"
    )
    options = parser.parse_args()
    options.ours = options.ours.split()
    options.other = {name: text.split() for name, _, text in (each.partition("=") for each in options.other)}
    options.checkout = {
        name: str(Path(folder).resolve())
        for name, _, folder in (each.partition("=") for each in options.checkout)
    }
    options.launcher = options.mpirun.split() if options.mpirun else default_launcher()
    become_reaper()
    document: dict[str, Any] = {"benchmark": "startup", **machine(options.launcher), "gpu": options.gpu}
    introduce(document)
    results: dict[str, dict[str, Any]] = {}
    everything: dict[str, list[dict[str, Any]]] = {}
    wrong = 0
    for ranks in options.ranks:
        for each in options.workers:
            if ranks * each > options.most:
                continue
            ways = [
                way
                for way in (*options.ways, *options.checkout, *options.other)
                if way not in options.without
                and (
                    way == OURS
                    or way in options.checkout
                    or way in options.other
                    or way in LIMITS
                    or ranks * each <= options.most_peers
                )
            ]

            def one(way: str, number: int, shape: tuple[int, int] = (ranks, each)) -> Run:
                return run_one(way, shape, number, options)

            runs = in_turn(ways, options.rounds + options.peaks, one)
            wrong += sum(run.way == OURS and bool(run.failure) for run in runs)
            rows = summary(runs)
            results[f"{ranks}x{each}"] = {
                GPU_NAMES.get(way, way) if options.gpu else way: rows[way] for way in rows
            }
            everything[f"{ranks}x{each}"] = [asdict(run) for run in runs]
            show(f"{ranks} rank(s) x {each} worker(s)", results[f"{ranks}x{each}"])
            write(options.json, {**document, "results": results, "runs": everything})
    plot(results, options.plot, groups="ranks x workers")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
