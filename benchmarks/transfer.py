"""Transfers between GPUs: dask_gpu_mpi over UCX beside TLS, TLS and TCP, LocalCUDACluster over UCX, and a plain copy.

    python benchmarks/transfer.py [--operation all-to-all] [--rounds 2] [--reps 8] [--json FILE] [--plot FILE.png]

Run it with the Python of an environment that has CuPy, RMM, distributed-ucxx and an MPI, whose mpirun is used. Transpose-sum is
the operation of dask-cuda's own benchmark `local_cupy`: ``(x + x.T).sum()`` of a square array of doubles, most of which crosses
between workers. All-to-all makes slabs of columns out of slabs of rows, for which every worker sends a part of its data
to each other worker. The clusters are interleaved; each has an RMM pool. Its first three repetitions, in which it
connects, do not count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import COLOURS, cluster, default_launcher, drawing, machine, parser_for, save, write

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
OPTIONS = {"rmm_pool_size": 0.4, "rmm_allocator_external_lib_list": "cupy"}

OPERATIONS = ["transpose-sum", "all-to-all"]
WAYS = ["ours, UCX beside TLS", "LocalCUDACluster, UCX", "ours, TCP", "ours, TLS"]

WORK = '''
import json, sys, time

def transpose_sum(client, size, chunk):
    """Three steps each time: prepare, the timed operation, check the result."""
    import cupy, dask.array as da
    from distributed import wait
    random = da.random.RandomState(seed=1, RandomState=cupy.random.RandomState)
    while True:
        # a new array each time: of one that was transposed before, every worker has kept what it received
        x = random.random((size, size), chunks=chunk).persist()
        wait(x)
        yield
        total = float((x + x.T).sum().compute())
        yield
        once = float(x.sum().compute())
        assert abs(total - 2 * once) < 1e-9 * size * size, (total, once)
        del x
        yield

def make(rows, columns):
    import cupy
    return cupy.random.random_sample((rows, columns))

def take(slab, first, width):
    return slab[:, first : first + width].copy()

def join(*parts):
    import cupy
    return cupy.concatenate(parts)

def total(slab):
    return float(slab.sum())

def all_to_all(client, size, chunk):
    """The same; all tasks have their workers, slabs of rows and of columns one after the other."""
    from distributed import wait
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    homes = [workers[number % len(workers)] for number in range(size // chunk)]
    def everywhere(function, *arguments):
        return [client.submit(function, *each, workers=home, pure=False) for home, *each in zip(homes, *arguments)]
    def summed(slabs):
        return sum(client.gather(everywhere(total, slabs)))
    while True:
        rows = everywhere(make, [chunk] * len(homes), [size] * len(homes))
        wait(rows)
        yield
        parts = [everywhere(take, rows, [chunk * number] * len(homes), [chunk] * len(homes)) for number in range(len(homes))]
        columns = everywhere(join, *zip(*parts))
        wait(columns)
        yield
        before, after = summed(rows), summed(columns)
        assert abs(before - after) < 1e-9 * size * size, (before, after)
        del rows, parts, columns
        yield

def work(client, operation, size, chunk, reps, seconds):
    """Seconds of each repetition."""
    turns = {"transpose-sum": transpose_sum, "all-to-all": all_to_all}[operation](client, size, chunk)
    found, made = [], []
    while len(found) < reps and (len(found) < 6 or sum(found) < seconds):
        begun = time.perf_counter()
        next(turns)
        start = time.perf_counter()
        next(turns)
        found.append(time.perf_counter() - start)
        made.append(start - begun)
        next(turns)
    print("RESULT " + json.dumps(found), flush=True)
    print("making the arrays:", [round(s, 2) for s in made], file=sys.stderr)
'''
OURS = (
    WORK
    + """
from distributed import Client
work(Client(), sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]))
"""
)
LOCAL = (
    WORK
    + """
if __name__ == "__main__":
    from dask_cuda import LocalCUDACluster
    from distributed import Client
    with LocalCUDACluster(protocol="ucx", rmm_pool_size=0.4, rmm_allocator_external_lib_list=["cupy"]) as cluster:
        with Client(cluster) as client:
            work(client, sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]))
"""
)
COPY = """
import json, time
import cupy
rt = cupy.cuda.runtime
if rt.getDeviceCount() < 2:
    print("RESULT []"); raise SystemExit
size = 4 << 30
with cupy.cuda.Device(0):
    a = cupy.zeros(size, dtype=cupy.uint8)
    rt.deviceEnablePeerAccess(1)
with cupy.cuda.Device(1):
    b = cupy.zeros(size, dtype=cupy.uint8)
    rt.deviceEnablePeerAccess(0)
found = []
for _ in range(10):
    rt.deviceSynchronize(); start = time.perf_counter()
    rt.memcpyPeer(b.data.ptr, 1, a.data.ptr, 0, size)
    with cupy.cuda.Device(0): rt.deviceSynchronize()
    with cupy.cuda.Device(1): rt.deviceSynchronize()
    found.append(size / (time.perf_counter() - start) / 1e9)
print("RESULT " + json.dumps(found))
"""


def run(argv: list[str], timeout: float) -> list[float]:
    """The list that the program prints; empty, with its last output, where it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired:
        print(f"  no end within {timeout:g} s: {argv[-6:]}", file=sys.stderr)
        return []
    print(
        "".join(f"  {line}\n" for line in done.stderr.splitlines() if line.startswith("making")),
        end="",
        file=sys.stderr,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return [float(value) for value in json.loads(line[7:])]
    print("\n".join((done.stdout + done.stderr).splitlines()[-5:]), file=sys.stderr)
    return []


def clusters(launcher: list[str], ranks: int, folder: Path) -> dict[str, list[str]]:
    """Command line of each, without the sizes."""
    for name, text in (("ours.py", OURS), ("local.py", LOCAL)):
        (folder / name).write_text(text)

    def ours(protocol: str) -> list[str]:
        options = ("--worker-options", json.dumps(OPTIONS), "--protocol", protocol)
        return cluster(launcher, ranks, *options, folder / "ours.py")

    local = [sys.executable, str(folder / "local.py")]
    commands = (ours("ucx"), local, ours("tcp"), ours("tls"))
    return dict(zip(WAYS, commands, strict=True))


def hardware() -> str:
    """The GPUs and cores here."""
    words = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
    )
    names = words.stdout.split("\n")[:-1]
    return f"{len(names)} x {names[0] if names else 'GPU'}, {os.cpu_count()} cores"


def plot(rates: dict[str, float], copy: float, file: Path | None, *, operation: str = OPERATIONS[0]) -> None:
    """Bars on a logarithmic scale."""
    pyplot = drawing(file)
    if pyplot is None or file is None or not rates:
        return
    figure, axes = pyplot.subplots(figsize=(7, 2.6))
    names = list(rates)[::-1]
    bars = axes.barh(names, [rates[name] for name in names], color=COLOURS[0])
    axes.bar_label(bars, fmt="%.3g", padding=3)
    if copy:
        axes.axvline(copy, color=COLOURS[1], linestyle="--", label=f"copy between two GPUs: {copy:.0f} GB/s")
        axes.legend(loc="lower right", fontsize="small")
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.set_xlabel(f"{operation}, GB/s of the array, median")
    save(figure, file)


def main() -> None:
    """Measure interleaved, print a table, and write the numbers if a file is given."""
    parser = parser_for(__doc__)
    parser.add_argument("--operation", choices=OPERATIONS, default=OPERATIONS[0])
    parser.add_argument("--size", type=int, default=40_000, help="rows and columns")
    parser.add_argument(
        "--chunk", type=int, default=10_000, help="rows and columns of a chunk; all-to-all: of a slab"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=2, help="turns of every cluster")
    parser.add_argument("--reps", type=int, default=20, help="repetitions in a turn, at most")
    parser.add_argument("--seconds", type=float, default=12.0, help="of repetitions in a turn, about")
    arguments = parser.parse_args()
    launcher = default_launcher()
    work = (arguments.operation, arguments.size, arguments.chunk, arguments.reps, arguments.seconds)
    seconds: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands = clusters(launcher, arguments.ranks, Path(folder))
        copies = run([sys.executable, "-c", COPY], 60)
        size = 8 * arguments.size**2
        document: dict[str, Any] = {
            "benchmark": "transfer",
            **machine(launcher),
            "hardware": hardware(),
            "operation": arguments.operation,
            "bytes": size,
            "copy_GB_s": copies,
            "seconds": seconds,
        }
        for _ in range(arguments.rounds):
            for name in arguments.ways:
                command = commands[name]
                start = time.perf_counter()
                seconds.setdefault(name, []).append(run([*command, *map(str, work)], arguments.seconds + 60))
                print(f"  {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                write(arguments.json, document)  # the results so far are kept if it ends early
    steady = {name: [s for turn in turns for s in turn[WARM_UP:]] for name, turns in seconds.items()}
    rates = {name: size / statistics.median(found) / 1e9 for name, found in steady.items() if found}
    best = {name: size / min(found) / 1e9 for name, found in steady.items() if found}
    copy = statistics.median(copies) if copies else 0.0
    print(f"{hardware()}; {arguments.operation}, {arguments.size}² in chunks of {arguments.chunk}", end="; ")
    print(f"copy between two GPUs {copy:.0f} GB/s")
    for name, rate in rates.items():
        print(f"{name:24} {rate:8.1f} GB/s median, {best[name]:8.1f} best, {len(steady[name])} repetitions")
    first = next(iter(rates), "")
    for other in [*rates][1:]:
        print(f"{first} / {other}: {rates[first] / rates[other]:.2f}")
    write(arguments.json, {**document, "median_GB_s": rates})
    plot(rates, copy, arguments.plot, operation=arguments.operation)


if __name__ == "__main__":
    main()
