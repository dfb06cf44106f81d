"""What the report of a job costs (`--report`): CPU of the scheduler's process, and the file of a long job.

    python benchmarks/recording.py --report-workers 64 --json benchmarks/results/recording.json

The CPU is that of a scheduler's process with so many workers, which another process has, in windows with and without the
recorder, which take turns: idle, and while a few hundred tasks a second run that fetch data from each other. The file is of a job
that is made up: an hour of so many workers whose heartbeats, tasks, transfers and deaths the recorder is told as fast as it can
take them.
`benchmarks/overhead.py` prints the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import default_launcher, introduce, machine, middle, parser_for, write

from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.view.job_watch import JobWatch
from dask_gpu_mpi.view.recorder import Recorder
from dask_gpu_mpi.view.report_data import ReportedJob, assemble, write_report

GIB = 2**30
#: When the made-up job begins, in seconds since the epoch.
EPOCH = 1_790_000_000.0


class MadeUpJob:
    """A scheduler, as far as the recorder knows it, whose workers compute by a clock of its own.

    Parameters
    ----------
    nodes, gpus : int
        Nodes, and workers on each.
    """

    def __init__(self, nodes: int, gpus: int) -> None:
        self.now = EPOCH
        self.plan = make_plan(hypothetical_job(nodes, 1, gpus), Options())
        self.names = [str(worker.name) for worker in self.plan.workers]
        self.workers: dict[str, Any] = {}
        self.plugins: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self.task_prefixes: dict[str, Any] = {}
        self.transition_counter = 0
        self.deaths: list[tuple[float, Any]] = []
        self.watch = JobWatch(self.plan)
        self.plugins[JobWatch.name] = self.watch
        self.recorder = Recorder(self, clock=lambda: self.now)
        self._ports = iter(range(10_000, 1_000_000))
        self._tasks = 0
        for name in self.names:
            self.now += 0.01
            self.start(name)

    def get_events(self, topic: str) -> Any:
        """The deaths of workers."""
        return self.deaths

    def start(self, name: str) -> None:
        """A worker arrives."""
        node = int(name.partition("-")[0])
        address = f"tls://10.0.{node // 250}.{node % 250 + 1}:{next(self._ports)}"
        self.workers[address] = SimpleNamespace(
            name=name,
            nthreads=1,
            memory_limit=64 * GIB,
            metrics={},
            processing={},
            executing={},
            last_seen=self.now,
        )
        self.recorder.add_worker(self, address)

    def kill(self, name: str) -> None:
        """A worker dies, and comes again."""
        address = next(address for address, state in self.workers.items() if state.name == name)
        del self.workers[address]
        self.recorder.remove_worker(self, address, stimulus_id=f"handle-worker-cleanup-{self.now}")
        output = "distributed.worker - ERROR - out of memory\ndistributed.worker - INFO - the end"
        self.deaths.append((self.now, {"worker": name, "how": "signal 9", "output": output}))
        self.watch.warnings.append((self.now, f"worker {name} lost"))
        self.now += 2.0
        self.start(name)

    def second(self, tasks: int) -> None:
        """A second of the job."""
        for _ in range(tasks):
            self.recorder.transition("key", "released", "waiting")
        self.now += 1.0
        for number, state in enumerate(self.workers.values()):
            wave = 0.5 + 0.5 * math.sin(self.now / 60 + number)
            state.metrics = {
                "cpu": 100 * wave,
                "memory": int((4 + 10 * wave) * GIB),
                "managed_bytes": int(8 * wave * GIB),
                "spilled_bytes": {"memory": 0, "disk": int(max(0.0, wave - 0.8) * 20 * GIB)},
                "gpu_utilization": int(100 * wave),
                "gpu_memory_used": int((8 + 60 * wave) * GIB),
                "rmm": {"rmm-used": int(50 * wave * GIB), "rmm-total": 60 * GIB},
            }
        self.recorder.sample()
        addresses = list(self.workers)
        for number in range(tasks):
            self._task(addresses, self.now - 1.0 + number / tasks)

    def _task(self, addresses: list[str], start: float) -> None:
        self._tasks += 1
        name = ("load", "transform", "sum", "fit")[self._tasks % 4]
        address = addresses[self._tasks * 7 % len(addresses)]
        length = 0.2 + 0.1 * (self._tasks % 5) + 20.0 * (self._tasks % 5_003 == 0)
        startstops: list[dict[str, Any]] = [{"action": "compute", "start": start, "stop": start + length}]
        if self._tasks % 4:
            source = addresses[(self._tasks * 13 + 1) % len(addresses)]
            fetched = {
                "action": "transfer",
                "start": start - 0.05,
                "stop": start,
                "source": source,
                "nbytes": 2**20,
            }
            startstops.insert(0, fetched)
        failed = self._tasks % 9_001 == 0
        self.transition_counter += 5
        prefix = self.task_prefixes.setdefault(name, Prefix(name))
        prefix.add(startstops, failed)
        self.recorder.transition(
            (f"{name}-0123456789abcdef0123456789abcdef", self._tasks),
            "processing",
            "erred" if failed else "memory",
            worker=address,
            thread=id(address),
            startstops=startstops,
            nbytes=2**20,
        )

    def report(self) -> dict[str, Any]:
        """The figures of its report."""
        hosts = {rank: host.host for host in self.plan.hosts for rank in host.ranks}
        steps = {
            rank: [
                Step(process, step, EPOCH + begin, EPOCH + begin + 0.5 + rank % 7 / 10)
                for process, step, begin in (
                    ("rank", "import", 0.0),
                    ("rank", "import mpi4py, MPI_Init", 0.6),
                    ("agent", "import", 0.2),
                    (f"worker {rank}-0", "start", 1.2),
                )
            ]
            for rank in hosts
        }
        job = ReportedJob(
            plan=self.plan,
            options=Options(worker_options={"rmm_pool_size": 0.8}, explicit=frozenset({"worker_options"})),
            began=EPOCH,
            ready=EPOCH + 3.0,
            ended=self.now,
            how="the script ended",
            exit_code=0,
            warnings=("a warning",),
            hosts=hosts,
            steps=steps,
        )
        return assemble(job, self.recorder.record())


class Prefix:
    """What the recorder takes of Dask's `TaskPrefix`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state_counts: dict[str, int] = defaultdict(int)
        self.all_durations: dict[str, float] = defaultdict(float)
        self.max_exec_time = -1.0

    @property
    def duration(self) -> float:
        """Seconds of all that was done."""
        return sum(self.all_durations.values())

    def add(self, startstops: list[dict[str, Any]], failed: bool) -> None:
        """A task has run."""
        self.state_counts["erred" if failed else "memory"] += 1
        for each in startstops:
            self.all_durations[each["action"]] += each["stop"] - each["start"]


def made_up(nodes: int, gpus: int, seconds: int, tasks: int, *, deaths: int = 2) -> MadeUpJob:
    """A job of so many seconds, with so many tasks in each."""
    job = MadeUpJob(nodes, gpus)
    for second in range(seconds):
        job.second(tasks)
        if deaths and second % (seconds // (deaths + 1) or 1) == 1 and second > 1:
            job.kill(job.names[second % len(job.names)])
    return job


def measure_file(workers: int, seconds: int, tasks: int) -> dict[str, Any]:
    """Bytes of the reports of a made-up job, and seconds to make them; of the page with and without the import of bokeh."""
    job = made_up(max(1, workers // 4), min(4, workers), seconds, tasks)
    begun = time.process_time()
    for _ in range(200):
        job.now += 1.0
        job.recorder.sample()
    sampling = (time.process_time() - begun) / 200
    begun = time.process_time()
    record = job.recorder.record()
    asked = time.process_time() - begun
    begun = time.process_time()
    data = job.report()
    found: dict[str, Any] = {
        "workers": len(job.names),
        "seconds": seconds,
        "tasks": seconds * tasks,
        "sample_ms": round(1e3 * sampling, 3),
        "record_s": round(asked, 3),
        "record_packed_mib": round(sum(map(len, _packed(record))) / 2**20, 2),
        "assemble_s": round(time.process_time() - begun, 3),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("report.json", "report.html", "again.html"):
            path = Path(folder, name)
            begun = time.perf_counter()
            write_report(str(path), data)
            found[f"{name.replace('.', '_')}_s"] = round(time.perf_counter() - begun, 3)
            found[f"{name.replace('.', '_')}_mib"] = round(path.stat().st_size / 2**20, 2)
    return found


def _packed(data: Any) -> list[bytes]:
    if isinstance(data, dict):
        return [part for value in data.values() for part in _packed(value)]
    return [data] if isinstance(data, bytes) else []


#: Holds so many workers, in a process of its own, until its standard input ends.
WORKERS = """
import asyncio, sys
from distributed import Worker
async def main():
    workers = [Worker(sys.argv[1], nthreads=1, dashboard=False, name=str(i)) for i in range(int(sys.argv[2]))]
    await asyncio.gather(*workers)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
#: A scheduler in a process of its own: prints its address.
SCHEDULER = """
import asyncio, sys
from distributed import Scheduler
from dask_gpu_mpi.view.job_watch import JobWatch
async def main():
    async with Scheduler(dashboard=False, dashboard_address=":0", host="127.0.0.1") as scheduler:
        scheduler.add_plugin(JobWatch(None))  # every job has it
        print(scheduler.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


def _switch(on: bool, dask_scheduler: Any) -> float:
    """In the scheduler's process: with or without the recorder; its CPU seconds until now."""
    from dask_gpu_mpi.view.recorder import Recorder, recorder_of

    known = dask_scheduler.plugins.get(Recorder.name)
    if known is not None and not on:
        known._sampling.cancel()
        dask_scheduler.remove_plugin(Recorder.name)
    elif on:
        recorder_of(dask_scheduler)
    return time.process_time()


def _add(a: bytes, b: bytes) -> bytes:
    return a


def measure_cpu(workers: int, window: float, rounds: int, tasks: int) -> dict[str, Any]:
    """CPU of the scheduler's process, % of a core, with and without the recorder, in turn; `tasks` in a second."""
    from distributed import Client

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", *arguments],
            # for what runs on the scheduler, if this module is not the program
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
                ),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what each worker logs of its start
            text=True,
        )

    scheduler = start(SCHEDULER)
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().strip()
    holder = start(WORKERS, address, str(workers))
    pairs = []
    try:
        with Client(address) as client:
            client.wait_for_workers(workers, timeout=120)
            time.sleep(3.0)
            for number in range(rounds):
                pair = {}
                for on in (True, False) if number % 2 else (False, True):
                    before, begun = client.run_on_scheduler(_switch, on), time.monotonic()
                    while time.monotonic() < begun + window:
                        turn = time.monotonic()
                        if tasks:
                            made = client.map(bytes, [1000] * (tasks // 2), pure=False)
                            client.gather(client.map(_add, made, made[::-1], pure=False))
                        time.sleep(max(0.0, turn + 1.0 - time.monotonic()))
                    used = client.run_on_scheduler(_switch, on) - before
                    pair["on" if on else "off"] = 100 * used / (time.monotonic() - begun)
                pairs.append(pair)
    finally:
        for process in (holder, scheduler):
            process.kill()
            process.wait()
    return {
        "workers": workers,
        "tasks_per_s": tasks,
        "with_percent": middle([pair["on"] for pair in pairs]),
        "without_percent": middle([pair["off"] for pair in pairs]),
        "difference_percent": middle([pair["on"] - pair["off"] for pair in pairs]),
        "ratio": middle([pair["on"] / pair["off"] for pair in pairs]),
        "rounds": pairs,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark, and of those that have it as a part."""
    parser.add_argument(
        "--report-workers", type=int, default=64, help="workers of the jobs with a report; 0: none"
    )
    parser.add_argument("--window", type=float, default=15.0, help="seconds with, and without, the recorder")
    parser.add_argument("--pairs", type=int, default=4, help="of such windows")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it, printed."""
    if not options.report_workers:
        return {}
    rows = [measure_cpu(options.report_workers, options.window, options.pairs, tasks) for tasks in (0, 200)]
    for row in rows:
        print(
            f"report, {row['workers']} workers, {row['tasks_per_s']} tasks a second: the scheduler takes "
            f"{row['with_percent']} % of a core with the recorder, {row['without_percent']} % without; difference within pairs, "
            f"median: {row['difference_percent']} %, ratio {row['ratio']}"
        )
    file = measure_file(options.report_workers, 3600, 200)
    print(f"report, an hour that is made up: {json.dumps(file)}")
    return {"cpu": rows, "file": file}


def main() -> int:
    """Measure, print, write."""
    parser = parser_for(__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    where = {"benchmark": "recording", **machine(default_launcher())}
    introduce(where)
    write(options.json, {**where, "report": measure(options)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
