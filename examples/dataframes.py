"""DataFrames on GPUs with cuDF, or the same code on pandas: Parquet, a join by shuffle, means by group, checked against pandas.

    dask-gpu-mpi launch -n 2 examples/dataframes.py

Workers write the data into a folder in the working directory, which all nodes must share; it is removed at the end. Needs
dask[dataframe]. Exit code 1: the answer differs.
"""

from __future__ import annotations

import importlib
import os
import sys
from tempfile import TemporaryDirectory
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

PARTITIONS, ROWS, GROUPS = 30, 10_000, 7


def values(seed: int) -> pd.DataFrame:
    """One partition of the first table; runs on a worker."""
    random = np.random.default_rng(seed)
    station, sample = random.integers(GROUPS, size=ROWS), np.arange(ROWS) * PARTITIONS + seed
    return pd.DataFrame({"sample": sample, "station": station, "value": random.normal(station, 1.0)})


def weights(seed: int) -> pd.DataFrame:
    """One partition of the second, which has the same samples in another order."""
    sample = np.random.default_rng(0).permutation(PARTITIONS * ROWS)[seed::PARTITIONS]
    return pd.DataFrame({"sample": sample, "weight": 1.0 + sample % 3})


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


def main() -> int:
    """Write, read, join, compare; return the exit code."""
    with Client() as client, TemporaryDirectory(dir=os.getcwd()) as folder:
        name = choose_library(client).__name__
        for make in (values, weights):
            dd.from_map(make, range(PARTITIONS)).to_parquet(f"{folder}/{make.__name__}", write_index=False)
        with dask.config.set({"dataframe.backend": name}):
            left, right = (dd.read_parquet(f"{folder}/{each}") for each in ("values", "weights"))
        # a shuffle of both: Dask may not send one of them to all workers
        joined = left.merge(right, on="sample", broadcast=False)
        joined = joined.assign(weighted=joined.value * joined.weight)
        means, rows = dask.compute(joined.groupby("station").weighted.mean(), joined.weight.count())
        means = (means.to_pandas() if hasattr(means, "to_pandas") else means).sort_index()
        print(f"{left.npartitions} partitions, {type(left.head()).__module__.partition('.')[0]}")
    whole = pd.concat([values(seed) for seed in range(PARTITIONS)])
    truth = (whole.value * (1.0 + whole["sample"] % 3)).groupby(whole.station).mean()
    print(means.round(4).to_string())
    error = np.abs(means - truth).max()
    if not error < 1e-9 or rows != len(whole):
        print(f"WRONG: {rows} rows, {error:.2e} from pandas", file=sys.stderr)
        return 1
    print(f"right: the means of {rows} joined rows by group are pandas', with {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
