"""CPU workers load and clean, GPU workers compute: the covariance of scikit-learn's digits, from their compressed file.

    dask-gpu-mpi launch -n 2 --cpu-workers 1 --default-workers gpu examples/cpu_and_gpu.py

Only tasks for CPU workers are annotated; with `--default-workers gpu` all other tasks go to GPU workers. Without GPUs all
workers are CPU workers. Without these options it runs as well, and prints which tasks ran where they should not. Exit code 1:
the answer differs from NumPy's, or a GPU worker has loaded although there are CPU workers.
"""

from __future__ import annotations

import gzip
import sys
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

import dask
import numpy as np
from distributed import Client, get_worker

ROWS, PARTS = 1797, 6


def load(part: int) -> tuple[np.ndarray, str]:
    """Read a part of the file, drop the labels, scale to 0..1; runs on a CPU worker."""
    lines = gzip.decompress((files("sklearn") / "datasets/data/digits.csv.gz").read_bytes()).splitlines()
    return np.loadtxt(lines[part::PARTS], delimiter=",")[:, :-1] / 16, str(get_worker().name)


def moments(loaded: tuple[np.ndarray, str]) -> tuple[Any, Any, str, str]:
    """Sums and products of a part, with CuPy where the worker has a GPU and CuPy; runs on a GPU worker."""
    block, loaded_by = loaded
    try:
        import cupy

        data = cupy.asarray(block)
    except Exception:  # no CuPy, or no GPU
        data = block
    sums, products = data.sum(axis=0), data.T @ data
    if hasattr(sums, "get"):
        sums, products = sums.get(), products.get()
    return sums, products, loaded_by, str(get_worker().name)


def main() -> int:
    """Load, compute, compare; return the exit code."""
    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        has_cpu_workers = any(worker["resources"].get("CPU") for worker in workers)
        # a task whose resource no worker has would wait forever
        with dask.annotate(resources={"CPU": 1}) if has_cpu_workers else nullcontext():
            parts = [dask.delayed(load, pure=False)(part) for part in range(PARTS)]
        tasks = [dask.delayed(moments)(part) for part in parts]
        # fusing tasks would lose the annotation
        found = dask.compute(*tasks, optimize_graph=False)
    gpu_workers = {str(worker["name"]) for worker in workers if worker["resources"].get("GPU")}
    loaded_by, computed_by = {answer[2] for answer in found}, {answer[3] for answer in found}
    print(f"loaded by {sorted(loaded_by)}, computed by {sorted(computed_by)}")
    if not has_cpu_workers:
        print("no CPU workers: the GPU workers have loaded as well. Fix: --cpu-workers 1", file=sys.stderr)
    elif loaded_by & gpu_workers:
        print(f"WRONG: the GPU workers are {sorted(gpu_workers)}", file=sys.stderr)
        return 1
    if gpu_workers and not computed_by <= gpu_workers:
        print("CPU workers have computed as well. Fix: --default-workers gpu", file=sys.stderr)
    mean = sum(answer[0] for answer in found) / ROWS
    covariance = (sum(answer[1] for answer in found) - ROWS * np.outer(mean, mean)) / (ROWS - 1)
    from sklearn.datasets import load_digits

    error = np.abs(covariance - np.cov(load_digits().data / 16, rowvar=False)).max()
    if not error < 1e-10:
        print(f"WRONG: the covariance differs from NumPy's by {error:.2e}", file=sys.stderr)
        return 1
    print(f"right: the covariance of {ROWS} digits is NumPy's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
