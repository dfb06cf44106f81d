"""Real work on the GPUs of this allocation, checked: run it as the script of a cluster.

    mpirun -np 1 python -m dask_gpu_mpi [--protocol ucx] --worker-options '{"rmm_pool_size": 0.8,
        "rmm_allocator_external_lib_list": "cupy"}' benchmarks/workloads.py [--fill 0.1]

A numba.cuda kernel on each worker; the SVD of a tall matrix of 10,000 x 1,000 as in Dask's documentation; and of one of which
each worker holds `--fill` of its GPU (the decomposition holds several times as much).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from distributed import Client, wait


def kernel(dask_worker: Any) -> tuple[bool, int]:
    """Triple an array on the worker's GPU; whether it is right, and the GPU's memory in bytes."""
    import numba.cuda

    @numba.cuda.jit
    def triple(values: Any) -> None:
        i = numba.cuda.grid(1)
        if i < values.size:
            values[i] = 3 * i

    count = 1_000_000
    values = numba.cuda.to_device(np.zeros(count, dtype=np.int64))
    triple[(count + 255) // 256, 256](values)
    right = bool((values.copy_to_host() == 3 * np.arange(count)).all())
    return right, int(numba.cuda.current_context().get_memory_info()[1])


def svd(client: Client, rows: int, columns: int, chunk: int) -> tuple[float, float]:
    """Seconds of the decomposition, and its largest error relative to the largest entry."""
    import cupy
    import dask
    import dask.array as da

    random = da.random.RandomState(seed=1, RandomState=cupy.random.RandomState)
    x = random.normal(size=(rows, columns), chunks=(chunk, columns)).persist()
    wait(x)
    start = time.perf_counter()
    u, s, v = dask.persist(*da.linalg.svd(x))
    wait([u, s, v])
    seconds = time.perf_counter() - start
    error = float(abs((u * s) @ v - x).max().compute() / abs(x).max().compute())
    del x, u, s, v
    return seconds, error


def main() -> None:
    """Run all of it, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fill", type=float, default=0.1, help="part of each GPU that the large matrix takes"
    )
    arguments = parser.parse_args()
    client = Client()
    start = time.perf_counter()
    found = list(client.run(kernel).values())
    assert all(right for right, _ in found), found
    print(f"kernel on {len(found)} workers: right, {time.perf_counter() - start:.2f} s", flush=True)
    for turn in ("first", "again"):
        seconds, error = svd(client, 10_000, 1_000, 1_000)
        assert error < 1e-10, error
        print(f"SVD of 10,000 x 1,000, {turn}: {seconds:.2f} s, largest error {error:.1e}", flush=True)
    columns = 1_000
    chunk = int(min(memory for _, memory in found) * arguments.fill / 4 / columns / 8)
    rows = 4 * len(found) * chunk
    seconds, error = svd(client, rows, columns, chunk)
    assert error < 1e-9, error
    size = rows * columns * 8 / 1e9
    print(
        f"SVD of {rows:,} x {columns:,} ({size:.0f} GB): {seconds:.2f} s, largest error {error:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
