"""Data between nodes: a job of ours with encryption and without, over TLS alone and TCP, and Dask's own workers over TCP.

    python benchmarks/between_nodes.py [--gpu] [--nodes 2] [--each 1] [--checkout NAME=FOLDER] [--rounds 3] [--json FILE]

As root: the nodes are network namespaces of this machine (ci/testbed/hosts-up), each with `--each` workers, with --gpu on a GPU
of its own, or on one that they share if there are fewer. Each round measures every way once, in turn. Every way runs the same
script: arrays one way, arrays of all workers at once (each takes one of a worker of the next node), small tasks, a transpose, and
with cuDF a merge and a shuffle. The first array of a script does not count. `--checkout`: another version of the package,
measured as ours. With one node: what does not cross.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import default_launcher, machine, middle, parser_for, write

ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "ci" / "testbed"
LIMIT = 150.0
PORT = 18791
SEALED, OPEN, TCP, DASK = "ours", "ours, --no-data-encryption", "ours, --protocol tcp", "Dask's workers, tcp"
WAYS = {SEALED: [], OPEN: ["--no-data-encryption"], TCP: ["--protocol", "tcp"]}
POOL = {"rmm_pool_size": "30GiB", "rmm_allocator_external_lib_list": "cupy"}

WORK = """
import json, os, sys, time
from statistics import median
gpu, size, folder = sys.argv[1] == "gpu", int(float(sys.argv[2])), sys.argv[3]

def make(n, k=0):
    import importlib
    module = importlib.import_module("cupy" if gpu else "numpy")
    return module.full(n, k, dtype="u1")

def take(*arrays):
    if gpu:
        import cupy
        cupy.cuda.Device().synchronize()
    return sum(int(x[0]) + int(x[-1]) for x in arrays)

def main():
    from distributed import Client, wait
    client = Client(sys.argv[6]) if len(sys.argv) > 6 else Client()
    nodes, each = map(int, sys.argv[4:6])
    client.wait_for_workers(nodes * each)
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])  # node by node: their addresses
    one, two = workers[0], workers[each % len(workers) or 1]
    found = {}

    def save():  # as far as it has come
        with open(os.path.join(folder, "found"), "w") as file:
            json.dump(found, file)

    def seconds(function):
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    def one_way(k):
        x = client.submit(make, size, k, workers=[one], pure=False)
        wait(x)
        right = lambda: client.submit(take, x, workers=[two], pure=False).result() == 2 * k or sys.exit("wrong")
        return size / 1e9 / seconds(right)

    def all_at_once():
        arrays = [client.submit(make, size, workers=[w], pure=False) for w in workers]
        wait(arrays)
        step = each if nodes > 1 else 1
        pairs = list(zip(workers, arrays[step:] + arrays[:step]))
        takes = lambda: client.gather([client.submit(take, x, workers=[w], pure=False) for w, x in pairs])
        return each * size / 1e9 / seconds(takes)

    one_way(1)
    found["one way, GB/s"] = median(one_way(k) for k in range(1, 6))
    all_at_once()
    found["all at once, GB/s into a node"] = median(all_at_once() for _ in range(3))
    small = [client.submit(make, 1000, workers=[one], pure=False) for _ in range(300)]
    wait(small)
    found["small arrays per s"] = 300 / seconds(lambda: wait([client.submit(take, x, workers=[two], pure=False) for x in small]))
    import dask, dask.array as da
    side, chunk = (30000, 5000) if gpu else (6000, 1000)
    with dask.config.set({"array.backend": "cupy" if gpu else "numpy"}):
        transposes = []
        for _ in range(4):  # a new array each time: of one that was transposed before, workers have kept what they received
            x = da.random.random((side, side), chunks=chunk).persist()
            wait(x)
            transposes.append(seconds((x + x.T).sum().compute))
    found["transpose, s"] = median(transposes[1:])
    save()
    try:
        import cudf, dask.dataframe as dd
    except ImportError:
        cudf = None
    if gpu and cudf is not None:
        def rows(part, n=10_000_000):
            import cupy, cudf
            return cudf.DataFrame({"k": cupy.random.randint(0, 80_000_000, n), "v": cupy.random.random(n)})
        meta = cudf.DataFrame({"k": [1], "v": [1.0]}).iloc[:0]
        left, right = (dd.from_map(rows, range(8), meta=meta).persist() for _ in range(2))
        wait([left, right])
        found["merge, s"] = median([seconds(lambda: len(left.merge(right, on="k"))) for _ in range(4)][1:])
        save()
        found["shuffle, s"] = median([seconds(lambda: wait(left.shuffle(on="k").persist())) for _ in range(3)][1:])

    def opened():
        import os, threading
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
        return sum("socket:" in link for link in links), threading.active_count()
    counts = client.run(opened).values()
    found["sockets of a worker"], found["threads of a worker"] = (max(column) for column in zip(*counts))
    save()

if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def hosts(count: int) -> Iterator[dict[str, str]]:
    """So many hosts, and the environment for them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        environ = {
            **os.environ,
            "TESTBED_DIR": folder,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": environ}
        subprocess.run([TESTBED / "hosts-up", str(count)], check=True, timeout=60, **quiet)
        try:
            yield environ
        finally:
            subprocess.run([TESTBED / "hosts-down"], timeout=60, **quiet)


def run(way: str, options: Any, checkouts: dict[str, str], environ: dict[str, str]) -> dict[str, float]:
    """One script on all workers; what it has found."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "work.py")
        script.write_text(WORK)
        work = [str(script), "gpu" if options.gpu else "cpu", str(options.size), folder]
        work += [str(options.nodes), str(options.each)]
        devices = [devices_of(node, options) for node in range(options.nodes)]
        env = {**environ, "PYTHONPATH": checkouts.get(way, str(ROOT))}
        processes = []
        try:
            if way == DASK:
                processes = list(peers(options, devices, env))
                line = [
                    TESTBED / "on",
                    "h1",
                    "env",
                    devices[0],
                    sys.executable,
                    *work,
                    f"tcp://10.77.0.1:{PORT}",
                ]
            else:
                line = ours(WAYS.get(way, []), options, devices, folder, work)
            # a script that does not end is a result as well
            with contextlib.suppress(subprocess.TimeoutExpired, subprocess.CalledProcessError):
                subprocess.run(line, cwd=folder, env=env, stdin=subprocess.DEVNULL, timeout=LIMIT, check=True)
        finally:
            for process in processes:
                process.terminate()
                process.wait(20)
        file = Path(folder, "found")
        found: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        return found


def gpu_count() -> int:
    """The GPUs of this machine."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetCount())


def devices_of(node: int, options: Any) -> str:
    """The environment variable with the GPUs of a node."""
    workers = range(node * options.each, (node + 1) * options.each) if options.gpu else ()
    numbers = dict.fromkeys(worker % options.gpus for worker in workers)
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))}"


def ours(words: list[str], options: Any, devices: list[str], folder: str, work: list[str]) -> list[Any]:
    """The command of a job of ours: Open MPI's mpirun over all hosts."""
    rank = Path(folder, "rank.sh")
    # a GPU that two nodes share is an error otherwise, as of one machine with two names
    file, boot_id = '"$0.$(hostname)"', "/proc/sys/kernel/random/boot_id"
    mounted = f"grep -q {boot_id} /proc/self/mounts"
    boot = f"{mounted} || {{ cat /proc/sys/kernel/random/uuid > {file}; mount --bind {file} {boot_id}; }}"
    shared = boot if options.gpu and options.gpus < options.nodes * options.each else ""
    cases = " ".join(f"h{number}) export {device};;" for number, device in enumerate(devices, 1))
    rank.write_text(
        f'#!/bin/sh\ncase $(hostname) in {cases} esac\n{shared}\nexec {sys.executable} -m dask_gpu_mpi "$@"\n'
    )
    rank.chmod(0o755)
    mpirun = Path(sys.prefix, "bin", "mpirun")
    passed = [word for name in ("PYTHONPATH", "PATH", "OMPI_ALLOW_RUN_AS_ROOT") for word in ("-x", name)]
    names = ",".join(f"h{number}" for number in range(1, options.nodes + 1))
    hosts = ["--host", names, "-np", str(options.nodes), "--map-by", "node", "--bind-to", "none"]
    on_cpus = ["--nthreads", "1", "--cpu-workers", str(options.each - 1)]
    worker = ["--worker-options", json.dumps(POOL)] if options.gpu else on_cpus
    agent = ["--prtemca", "plm_ssh_agent", TESTBED / "on-rsh"]
    return [TESTBED / "on", "h1", mpirun, *agent, *hosts, *passed, rank, *worker, *words, *work]


def peers(options: Any, devices: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler of Dask's own, and a worker on each host."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    where = ["--host", "10.77.0.1", "--port", str(PORT), "--no-dashboard"]
    yield subprocess.Popen(
        [TESTBED / "on", "h1", "env", devices[0], sys.executable, "-m", "dask", "scheduler", *where], **quiet
    )
    time.sleep(4)
    kind = ["cuda", "worker"] if options.gpu else ["worker"]
    on_cpus = ["--nthreads", "1", "--nworkers", str(options.each)]
    more = ["--rmm-pool-size", "30GiB"] if options.gpu else on_cpus
    for number, device in enumerate(devices, 1):
        command = [sys.executable, "-m", "dask", *kind, f"tcp://10.77.0.1:{PORT}", *more, "--no-dashboard"]
        yield subprocess.Popen([TESTBED / "on", f"h{number}", "env", device, *command], **quiet)


def main() -> int:
    """Run all rounds and print a table."""
    parser = parser_for(__doc__)
    parser.add_argument("--gpu", action="store_true", help="memory of GPUs")
    parser.add_argument("--size", type=float, help="bytes of an array; default: 2e9 on GPUs, else 2e8")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--each", type=int, default=1, help="workers of a node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--checkout", action="append", default=[], help="NAME=FOLDER: another version of the package"
    )
    parser.add_argument("--ways", nargs="+", default=[*WAYS, DASK])
    options = parser.parse_args()
    options.gpus = gpu_count() if options.gpu else 0
    options.size = options.size or (2e9 if options.gpu else 2e8)
    checkouts = dict(each.split("=", 1) for each in options.checkout)
    ways = [*options.ways, *checkouts]
    trials: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    about = {
        "benchmark": "between_nodes",
        **machine(default_launcher()),
        "gpu": options.gpu,
        "gpus": options.gpus,
        "nodes": options.nodes,
        "each": options.each,
    }
    with hosts(options.nodes) as environ:
        for number in range(options.rounds):
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                trials[way].append(run(way, options, checkouts, environ))
                print(way, trials[way][-1], flush=True)
                write(options.json, {**about, "trials": trials})  # they are kept if it ends early
    names = list(dict.fromkeys(name for found in trials.values() for each in found for name in each))
    for way, found in trials.items():
        row = {name: middle([each.get(name) for each in found]) for name in names}
        print(f"{way:28}", {name: round(value, 2) for name, value in row.items() if value is not None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
