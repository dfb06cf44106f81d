"""dask-cuda's own benchmarks inside a job of ours and by LocalCUDACluster over UCX, in turn.

    python benchmarks/rapids.py [--pairs 5] [--only merge shuffle transpose-sum polars] [--json FILE]

Run it with the Python of an environment that has cuDF, CuPy, dask-cuda and an MPI, whose mpirun is used; `polars` needs
cudf-polars as well. Ours is the default cluster, found by its scheduler file. Both use the first two GPUs and have an RMM pool of
half of each, CuPy's arrays in it. Polars has none, and is compared with the cluster that its DaskEngine makes for itself. Ratios
are of throughput, pair by pair; above 1 ours is faster.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import cluster, default_launcher, machine, parser_for, write

ROOT = Path(__file__).resolve().parents[1]
POOL = 0.5
#: Their own choice is the first GPU alone.
DEVICES = "0,1"
#: Module of dask_cuda.benchmarks, and its arguments.
BENCHMARKS = {
    "merge": ("local_cudf_merge", "-c", "20000000", "--runs", "10"),
    "shuffle": ("local_cudf_shuffle", "--partition-size", "100MiB", "--in-parts", "40", "--runs", "5"),
    "transpose-sum": ("local_cupy", "-o", "transpose_sum", "-s", "40000", "-c", "10000", "--runs", "20"),
}
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

POLARS = """
import sys, time, numpy as np, polars as pl
from pathlib import Path
from cudf_polars.engine.dask import DaskEngine
from distributed import Client

def main(own, folder):
    for seed in range(8) if not list(Path(folder).glob("*.parquet")) else ():
        random = np.random.default_rng(seed)
        columns = {"key": random.integers(1000, size=10_000_000), "value": random.random(10_000_000)}
        pl.DataFrame(columns).write_parquet(f"{folder}/{seed}.parquet")
    files = f"{folder}/*.parquet"
    sums = pl.scan_parquet(files).group_by("key").agg(pl.col("value").sum())
    query = pl.scan_parquet(files).join(sums, on="key").group_by("key").agg(pl.len()).sort("key")
    with DaskEngine(dask_client=None if own else Client()) as engine:
        found = []
        for _ in range(12):
            start = time.perf_counter()
            answer = query.collect(engine=engine)
            found.append(time.perf_counter() - start)
        assert answer["len"].sum() == 80_000_000, answer
    print("SECONDS", sorted(found[2:])[len(found[2:]) // 2], flush=True)

if __name__ == "__main__":
    main(sys.argv[1] == "own", sys.argv[2])
"""


def output(argv: list[str], timeout: float = 150) -> str:
    """What the program prints; empty if it fails, with its last lines on standard error."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        print(f"  no end within {timeout:g} s: {argv}", file=sys.stderr)
        return ""
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[-5:]), file=sys.stderr)
        return ""
    return done.stdout


def throughput(text: str) -> float:
    """Bytes a second by dask-cuda's own line, the median of its runs; a query a second of Polars; 0: it failed."""
    if found := re.search(r"^SECONDS ([0-9.]+)", text, re.MULTILINE):
        return 1 / float(found[1])
    found = re.search(r"^Throughput\s*\|\s*([0-9.]+) ([MGT]iB)/s", text, re.MULTILINE)
    return float(found[1]) * UNITS[found[2]] if found else 0.0


def measure(name: str, launcher: list[str], folder: Path) -> tuple[float, float]:
    """Ours, and the other's, in turn."""
    if name == "polars":
        script, data = folder / "polars_benchmark.py", folder / "data"
        script.write_text(POLARS)
        data.mkdir(exist_ok=True)
        ours = [*cluster(launcher, 1, "--no-dashboard", script), "ours", str(data)]
        other = [sys.executable, str(script), "own", str(data)]
    else:
        module, *arguments = BENCHMARKS[name]
        module, file = f"dask_cuda.benchmarks.{module}", str(folder / "scheduler.json")
        memory = {
            "rmm_pool_size": POOL,
            "rmm_allocator_external_lib_list": "cupy",
        }  # as the other's own set-up does
        options = ("--no-dashboard", "--worker-options", json.dumps(memory))
        # with a scheduler file their own `-p` is a label
        ours = [*cluster(launcher, 1, *options, "--scheduler-file", file, "-m", module), *arguments]
        ours += ["--scheduler-file", file, "-p", "tcp"]
        other = [
            sys.executable,
            "-m",
            module,
            *arguments,
            "-p",
            "ucx",
            "--rmm-pool-size",
            str(POOL),
            "-d",
            DEVICES,
        ]
    return throughput(output(ours)), throughput(output(other))


def medians(found: list[tuple[float, float]]) -> dict[str, float]:
    """Of the pairs in which both succeeded; nothing if none did."""
    good = [pair for pair in found if all(pair)]
    columns = {"ours": [pair[0] for pair in good], "other": [pair[1] for pair in good]}
    columns["ratio"] = [ours / other for ours, other in good]
    return {name: statistics.median(column) for name, column in columns.items()} if good else {}


def main() -> None:
    """Measure in pairs, print a table, and write the numbers if a file is given."""
    parser = parser_for(__doc__)
    names = [*BENCHMARKS, "polars"]
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = DEVICES
    launcher = default_launcher()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.only}
    document: dict[str, Any] = {"benchmark": "rapids", **machine(launcher), "pairs": pairs}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.pairs):
            for name in arguments.only:
                pairs[name].append(measure(name, launcher, Path(folder)))
                document["medians"] = {each: medians(found) for each, found in pairs.items()}
                write(arguments.json, document)  # the results so far are kept if it ends early
    for name, found in document["medians"].items():
        if found:
            unit, scale = ("queries/s", 1.0) if name == "polars" else ("GB/s", 1e9)
            ours, other = found["ours"] / scale, found["other"] / scale
            print(f"{name:14} {ours:7.2f} {unit}, other {other:7.2f}; ratio {found['ratio']:.2f}")
        else:
            print(f"{name:14} no pair succeeded")


if __name__ == "__main__":
    main()
