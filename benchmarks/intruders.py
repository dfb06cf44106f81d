"""What strangers cost a job that they don't get into: the time of a fixed piece of work, undisturbed and under attack.

    python benchmarks/intruders.py --rounds 10 --json benchmarks/results/intruders.json

Run it with the Python of an environment that has an MPI: that MPI's mpirun is used. The job has one host and workers with one
thread each; its script computes a fixed number of tasks, of some milliseconds each, when all workers are there. A trial measures
each configuration once, undisturbed first in every other one; ratios are taken within a trial.

The intruder opens ``--rate`` connections a second, to the scheduler, the workers, the nannies and the scheduler's HTTP, one after
the other: it says nothing and hangs up, sends garbage, begins TLS without a certificate, and keeps every fourth open for two
seconds. It runs on the same machine with the lowest priority (nice 19), since a real one would have a machine of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from common import (
    Job,
    become_reaper,
    cluster,
    default_launcher,
    introduce,
    machine,
    middle,
    parser_for,
    write,
)

SCRIPT = """
from distributed import Client

def work(number):
    begun = time.process_time()
    total = 0
    while time.process_time() - begun < 0.005:
        total += sum(range(1000))
    return number

def ports(dask_worker):
    return int(dask_worker.address.rpartition(":")[2])

def of_scheduler(dask_scheduler):
    return [int(dask_scheduler.address.rpartition(":")[2]), dask_scheduler.http_server.port]

with Client() as client:
    client.wait_for_workers(count)
    client.gather(client.map(work, range(20)))
    found = [*client.run_on_scheduler(of_scheduler), *client.run(ports).values(), *client.run(ports, nanny=True).values()]
    note("ready", ports=found)
    pause()
    begun = time.perf_counter()
    for turn in range(int(os.environ["INTRUDERS_TURNS"])):
        numbers = range(1000 + 200 * turn, 1200 + 200 * turn)
        assert client.gather(client.map(work, numbers)) == list(numbers)
    note("done", seconds=time.perf_counter() - begun)
"""
#: Seconds that every fourth connection is kept open.
KEPT = 2.0
#: Seconds of attack before the work begins.
AHEAD = 1.0
#: Seconds that the work may take.
LIMIT = 120.0


def intrude(ports: Sequence[int], rate: float) -> None:
    """Attack these ports of this host until somebody ends this process."""
    os.nice(19)
    chance = random.Random(1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    kept: deque[tuple[float, socket.socket]] = deque()
    begun, number = time.monotonic(), 0
    while True:
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
        number += 1
        while kept and kept[0][0] < time.monotonic():
            kept.popleft()[1].close()
        with contextlib.suppress(OSError):
            stream = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 1.0)
            if number % 4 == 0:
                kept.append((time.monotonic() + KEPT, stream))
                continue
            with stream:
                if number % 4 == 1:
                    stream.sendall(chance.randbytes(chance.randrange(1, 65536)))
                elif number % 4 == 2:
                    context.wrap_socket(stream).close()


def measure(options: Any, *, attacked: bool) -> dict[str, Any]:
    """Seconds of the work; what the job printed, in lines."""
    with Job(SCRIPT, options.workers, INTRUDERS_TURNS=options.turns) as job:
        more = ["--cpu-workers", str(options.workers - 1), "--nthreads", "1", job.script]
        job.start(cluster(options.launcher, 1, *more))
        ready = job.wait("ready")
        if ready is None:
            raise RuntimeError(f"it did not start: {job.output()}")
        intruder = None
        if attacked:
            line = [
                sys.executable,
                __file__,
                "--intrude",
                *map(str, ready["ports"]),
                "--rate",
                str(options.rate),
            ]
            intruder = subprocess.Popen(line)
        try:
            time.sleep(AHEAD)
            job.go_on()
            done = job.wait("done", limit=LIMIT)
        finally:
            if intruder is not None:
                intruder.kill()
                intruder.wait()
        if done is None:
            raise RuntimeError(f"it did not end: {job.output()}")
        job.wait_for_end()
        lines = job.output(1 << 30).count("\n")
        return {"seconds": round(done["seconds"], 3), "lines": lines, "code": job.code}


def summary(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of both, and of the ratios within trials."""
    return {
        "undisturbed_s": middle([each["undisturbed"]["seconds"] for each in rounds]),
        "attacked_s": middle([each["attacked"]["seconds"] for each in rounds]),
        "ratio": middle([each["attacked"]["seconds"] / each["undisturbed"]["seconds"] for each in rounds]),
        "lines": middle([each["attacked"]["lines"] for each in rounds]),
        "codes": sorted({each[way]["code"] for each in rounds for way in each}),
    }


def main() -> int:
    """Measure, print, write."""
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="of 200 tasks of 5 ms each")
    parser.add_argument("--rate", type=float, default=200.0, help="connections a second")
    parser.add_argument(
        "--intrude", type=int, nargs="+", metavar="PORT", help="be the intruder, at these ports"
    )
    options = parser.parse_args()
    if options.intrude:
        intrude(options.intrude, options.rate)
    options.launcher = default_launcher()
    become_reaper()
    where = {"benchmark": "intruders", **machine(options.launcher)}
    introduce(where)
    rounds = []
    for number in range(options.rounds):
        ways = ("undisturbed", "attacked") if number % 2 == 0 else ("attacked", "undisturbed")
        rounds.append({way: measure(options, attacked=way == "attacked") for way in ways})
        print({way: rounds[-1][way] for way in sorted(ways)}, flush=True)
    found = summary(rounds)
    print(
        f"{options.workers} workers, {options.rate:g} connections a second: {found['attacked_s']} s, undisturbed "
        f"{found['undisturbed_s']} s, {found['ratio']} × (median within trials); {found['lines']} lines"
    )
    shape = {"workers": options.workers, "turns": options.turns, "rate": options.rate}
    write(options.json, {**where, **shape, **found, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
