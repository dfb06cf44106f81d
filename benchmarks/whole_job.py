"""A job of RAPIDS from its launch to its exit: ours, and by LocalCUDACluster over UCX, in turn.

    python benchmarks/whole_job.py [--pairs 3] [--gpus 2] [--checkout NAME=FOLDER] [--json FILE]

Run it with the Python of an environment that has cuDF, dask-cuDF, CuPy, XGBoost and dask-cuda. The job reads Parquet files of 80
million rows, groups and joins them, writes Parquet files, trains XGBoost, and decomposes a matrix of CuPy, on the first GPUs.
Both have an RMM pool of half of each GPU. The script imports cuDF, dask-cuDF and CuPy in its first lines, as most do. Seconds are
those since the launch: until the client sees all workers, the first result of cuDF, the script's last line, the exit. Ratios are
taken pair by pair; below 1 ours is faster. `--checkout`: another version of the package, measured as ours.
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

from common import default_launcher, machine, parser_for, write

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 150.0
OURS, OTHER = "ours", "LocalCUDACluster, UCX"
POOL = {"rmm_pool_size": 0.5, "rmm_allocator_external_lib_list": "cupy"}
STEPS = ("ready", "first cuDF result", "last line", "exit")

DATA = """
import sys, cudf, cupy
for part in range(8):
    rows = 10_000_000
    keys, values, others = cupy.random.randint(0, 1_000_000, rows), cupy.random.random(rows), cupy.random.random(rows)
    columns = {"key": keys, "value": values, "other": others}
    cudf.DataFrame(columns).to_parquet(f"{sys.argv[1]}/{part}.parquet")
"""

WORK = """
import json, shutil, sys, time
import cudf, cupy, dask, dask_cudf
import dask.array as da
from distributed import Client, wait

local, data, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
found = {}

def note(name):
    found[name] = time.time()

def main():
    if local is not None:
        from dask_cuda import LocalCUDACluster
        client = Client(LocalCUDACluster(protocol="ucx", **local))
    else:
        client = Client()
    client.wait_for_workers(int(sys.argv[4]))
    note("ready")
    table = dask_cudf.read_parquet(f"{data}/*.parquet")
    assert 39_000_000 < table["value"].sum().compute() < 41_000_000
    note("first cuDF result")
    table = table.persist()
    means = table.groupby("key")["value"].mean().rename("mean").reset_index()
    joined = table.merge(means, on="key")
    joined.to_parquet(f"{folder}/joined")
    note("joined")
    from xgboost import dask as dxgb
    few = dask_cudf.read_parquet(f"{folder}/joined").partitions[:4].persist()
    wait(few)
    matrix = dxgb.DaskQuantileDMatrix(client, few[["key", "other", "mean"]], few["value"])
    dxgb.train(client, {"device": "cuda", "tree_method": "hist"}, matrix, num_boost_round=20)
    note("trained")
    del few, matrix, table, joined
    with dask.config.set({"array.backend": "cupy"}):
        x = da.random.random((2_000_000, 200), chunks=(250_000, 200))
        s = da.linalg.svd(x)[1].compute()
    assert s.shape == (200,)
    note("last line")
    with open(f"{folder}/found", "w") as file:
        json.dump(found, file)

if __name__ == "__main__":
    main()
"""


def run(way: str, data: str, checkouts: dict[str, str]) -> dict[str, float]:
    """One job: the seconds since its launch of each step; empty if it failed."""
    gpus = str(len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "work.py")
        script.write_text(WORK)
        path = os.pathsep.join(filter(None, [checkouts.get(way, str(ROOT)), os.environ.get("PYTHONPATH")]))
        if way == OTHER:
            command = [sys.executable, str(script), json.dumps(POOL)]
        else:
            options = ["-n", "1", "--worker-options", json.dumps(POOL)]
            command = [sys.executable, "-m", "dask_gpu_mpi", "launch", *options, str(script), "null"]
        began = time.time()
        with open(Path(folder, "out"), "wb") as out:
            process = subprocess.Popen(
                [*command, data, folder, gpus],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path},
                cwd=folder,
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(20)
                code = -1
        ended = time.time()
        file = Path(folder, "found")
        if code or not file.exists():
            print(f"{way}: exit code {code}", *Path(folder, "out").read_text().splitlines()[-15:], sep="\n  ")
            return {}
        times = {**json.loads(file.read_text()), "exit": ended}
        return {name: when - began for name, when in times.items()}


def main() -> int:
    """Run all pairs and print a table."""
    parser = parser_for(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--checkout", action="append", default=[], help="NAME=FOLDER: another version of the package"
    )
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(options.gpus)))
    checkouts = dict(each.split("=", 1) for each in options.checkout)
    ways = [OURS, OTHER, *checkouts]
    trials: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as data:
        subprocess.run([sys.executable, "-c", DATA, data], check=True, timeout=LIMIT)
        run(OTHER, data, checkouts)  # the first job on a machine reads libraries from its disk
        for number in range(options.pairs):
            for way in ways if number % 2 == 0 else ways[::-1]:
                trials[way].append(run(way, data, checkouts))
                print(way, {name: round(value, 2) for name, value in trials[way][-1].items()}, flush=True)
    document: dict[str, Any] = {
        "benchmark": "whole_job",
        **machine(default_launcher()),
        "gpus": options.gpus,
        "trials": trials,
    }
    write(options.json, document)
    for way in ways:
        pairs = [pair for pair in zip(trials[way], trials[OTHER], strict=True) if all(pair)]
        if pairs:
            row = {
                name: f"{statistics.median(a[name] for a, _ in pairs):.2f} s, ratio "
                f"{statistics.median(a[name] / b[name] for a, b in pairs):.2f}"
                for name in STEPS
            }
            print(f"{way:24}", row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
