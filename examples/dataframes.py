"""DataFrames on GPUs with cuDF, or the same code on pandas: means by group over 30 partitions, checked against pandas.

    dask-gpu-mpi launch -n 2 examples/dataframes.py

Needs dask[dataframe]. Exit code 1: the answer differs.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

PARTITIONS, ROWS, GROUPS = 30, 10_000, 7


def generate(seed: int) -> pd.DataFrame:
    """One partition of the table; runs on a worker."""
    random = np.random.default_rng(seed)
    station = random.integers(GROUPS, size=ROWS)
    return pd.DataFrame({"station": station, "value": random.normal(station, 1.0)})


def choose_library(client: Client) -> Any:
    """The module cudf when every worker has a GPU and cuDF, and this process has it too; else pandas."""

    def cudf_works(dask_worker: Any = None) -> bool:
        try:
            return int(importlib.import_module("cudf").Series([1, 2]).sum()) == 3
        except Exception:
            return False

    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    with_gpus = all(worker["resources"].get("GPU") for worker in workers)
    works = with_gpus and cudf_works() and all(client.run(cudf_works).values())
    return importlib.import_module("cudf" if works else "pandas")


def to_pandas(table: Any) -> Any:
    """A copy in host memory."""
    return table.to_pandas() if hasattr(table, "to_pandas") else table


def main() -> int:
    """Compute, compare; return the exit code."""
    with Client() as client:
        library = choose_library(client)
        name = library.__name__
        # what Dask reads or makes itself (read_parquet, from_dict) is this library's
        with dask.config.set({"dataframe.backend": name}):
            names = dd.from_dict(
                {"station": list(range(GROUPS)), "height": [100.0 * i for i in range(GROUPS)]}, npartitions=1
            )
        table = dd.from_map(generate, range(PARTITIONS))
        if name == "cudf":
            table = table.map_partitions(library.from_pandas)
        print(f"{table.npartitions} partitions, {type(names.compute()).__module__.partition('.')[0]}")
        means = to_pandas(table.groupby("station").value.mean().compute()).sort_index()
        joined = to_pandas(table.merge(names, on="station").height.mean().compute())
    whole = pd.concat([generate(seed) for seed in range(PARTITIONS)])
    truth = whole.groupby("station").value.mean()
    print(means.round(4).to_string())
    error = max(np.abs(means - truth).max(), abs(joined / (100.0 * whole.station.mean()) - 1))
    if not error < 1e-9:
        print(f"WRONG: differs from pandas by {error:.2e}", file=sys.stderr)
        return 1
    print(f"right: the means of {len(whole)} rows by group are pandas', with {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
