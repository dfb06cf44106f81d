"""dask.array on GPUs with CuPy: the singular values of a tall random matrix, and the digits, both checked against NumPy.

    dask-gpu-mpi launch -n 2 examples/cupy_arrays.py

Needs scikit-learn for its digits. Without CuPy and a GPU all is the same on NumPy. Exit code 1: the answers differ.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, get_worker
from sklearn.datasets import load_digits

ROWS, COLUMNS, BLOCKS = 200_000, 32, 20


def to_host(array: Any) -> np.ndarray:
    """A copy in host memory."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def choose_library(client: Client) -> Any:
    """The module cupy when every worker has a GPU and CuPy works on it, and here; else numpy."""

    def cupy_works(dask_worker: Any = None) -> bool:
        try:
            return bool(importlib.import_module("cupy").arange(3).sum() == 3)
        except Exception:
            return False

    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    with_gpus = all(worker["resources"].get("GPU") for worker in workers)
    works = with_gpus and cupy_works() and all(client.run(cupy_works).values())
    return importlib.import_module("cupy" if works else "numpy")


def block_library(block: Any) -> np.ndarray:
    """Which library made a block, and on which worker; runs there."""
    return np.array([[f"{type(block).__module__.partition('.')[0]} on worker {get_worker().name}"]])


def main() -> int:
    """Compute, compare; return the exit code."""
    with Client() as client:
        library = choose_library(client)
        # arrays that Dask makes have CuPy blocks, and so do the results
        with dask.config.set({"array.backend": library.__name__}):
            x = client.persist(
                da.random.default_rng(0).random((ROWS, COLUMNS), chunks=(ROWS // BLOCKS, COLUMNS))
            )
            _, singular, _ = da.linalg.svd(x, coerce_signs=False)
            singular = to_host(singular.compute())
        blocks = x.map_blocks(
            block_library, dtype="U99", chunks=(1, 1), meta=np.empty((0, 0), "U99")
        ).compute()
        # existing data goes to the GPUs block by block
        digits = load_digits().data
        on_device = da.from_array(digits, chunks=(200, 64)).map_blocks(library.asarray)
        sums = to_host(on_device.sum(axis=0).compute())
        truth = np.linalg.svd(to_host(x.compute()), compute_uv=False)
    for line in sorted(set(blocks.ravel().tolist())):
        print(line)
    error = max(np.abs(singular / truth - 1).max(), np.abs(sums - digits.sum(axis=0)).max())
    if not error < 1e-9:
        print(f"WRONG: differs from NumPy by {error:.2e}", file=sys.stderr)
        return 1
    print(f"right: SVD of {ROWS} x {COLUMNS} and the sums of the digits are NumPy's, with {library.__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
