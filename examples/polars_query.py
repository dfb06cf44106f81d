"""A Polars query on all GPUs of the job, by cudf_polars' DaskEngine, or on CPU workers by Polars itself; checked against Polars.

    dask-gpu-mpi launch -n 2 examples/polars_query.py

The data is written into a folder in the working directory, which all nodes must share; it is removed at the end. Needs polars; on
GPUs cudf-polars, which makes every worker a member of its engine: no CPU workers, no rmm_pool_size. Exit code 1: the answer
differs.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
from distributed import Client

FILES, ROWS, GROUPS = 8, 100_000, 100


def write(path: str, seed: int) -> str:
    """One file of the table; runs on a worker."""
    random = np.random.default_rng(seed)
    group = random.integers(GROUPS, size=ROWS)
    pl.DataFrame({"group": group, "value": random.integers(1000, size=ROWS) + group}).write_parquet(path)
    return path


def query(table: pl.LazyFrame) -> pl.LazyFrame:
    """What is asked of the table: values above 500 by group."""
    selected = table.filter(pl.col("value") > 500)
    return selected.group_by("group").agg(pl.col("value").sum().alias("total"), pl.len().alias("rows"))


def part(path: str) -> pl.DataFrame:
    """The query of one file; runs on a CPU worker."""
    return query(pl.scan_parquet(path)).collect()


def main() -> int:
    """Write, ask, compare; return the exit code."""
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        folder = stack.enter_context(TemporaryDirectory(dir=os.getcwd()))
        files = client.gather(
            [client.submit(write, f"{folder}/{seed}.parquet", seed) for seed in range(FILES)]
        )
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if all(worker["resources"].get("GPU") for worker in workers) and find_spec("cudf_polars"):
            from cudf_polars.engine.dask import DaskEngine
            from cudf_polars.engine.hardware_binding import HardwareBindingPolicy

            # the workers are bound to the cores near their GPUs already
            options = {"hardware_binding": HardwareBindingPolicy(enabled=False)}
            engine = stack.enter_context(DaskEngine(dask_client=client, engine_options=options))
            answer, name = query(pl.scan_parquet(files)).collect(engine=engine), "GPUs"
        else:
            parts = pl.concat(client.gather(client.map(part, files)))
            answer, name = parts.group_by("group").agg(pl.col("total", "rows").sum()), "CPUs"
        truth = query(pl.scan_parquet(files)).collect().sort("group")
    answer = answer.sort("group").cast(truth.schema)
    print(answer.head(3).rows())
    if not answer.equals(truth):
        print("WRONG: differs from Polars in one process", file=sys.stderr)
        return 1
    rows = answer["rows"].sum()
    print(f"right: {rows} of {FILES * ROWS} rows in {len(answer)} groups as in one process, on {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
