"""Principal components of the handwritten digits, on every worker of the job, checked against scikit-learn.

    dask-gpu-mpi launch -n 2 examples/digits_pca.py

The data set (1797 images of 8 x 8 pixels) comes with scikit-learn. Its centred matrix is factored by a singular value
decomposition over dask.array: with CuPy if workers have GPUs, else with NumPy. Exit code 1: the answer
differs from that of sklearn.decomposition.PCA.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA


def cupy_works() -> bool:
    """Whether CuPy can be used in this process; runs on a worker."""
    try:
        import cupy

        cupy.arange(3).sum().get()
    except Exception:
        return False
    return True


def choose_device(workers: dict[str, dict[str, Any]], client: Client) -> str:
    """Return "GPU" when there are workers with that resource and CuPy works on each of them, else "CPU"."""
    gpu_workers = [address for address, worker in workers.items() if worker["resources"].get("GPU")]
    if gpu_workers and all(client.run(cupy_works, workers=gpu_workers).values()):
        return "GPU"
    return "CPU"


def to_gpu(block: np.ndarray) -> Any:
    """Copy a block to the GPU; runs on a worker."""
    import cupy

    return cupy.asarray(block)


def to_host(block: Any) -> np.ndarray:
    """Copy a block to host memory, whichever library it belongs to; runs on a worker."""
    return block.get() if hasattr(block, "get") else np.asarray(block)


def principal_components(
    data: np.ndarray, count: int, blocks: int, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` components (a row each) and the variance that each explains."""
    # Fused tasks would lose the annotation that sends them to the GPU workers.
    annotation = {"resources": {"GPU": 1}} if device == "GPU" else {}
    with dask.annotate(**annotation), dask.config.set({"optimization.fuse.active": False}):
        x = da.from_array(data, chunks=(-(-len(data) // blocks), data.shape[1]))
        if device == "GPU":
            # NumPy still stands for the blocks in the client, which needs no GPU; on the workers they are CuPy's
            x = x.map_blocks(to_gpu, dtype=data.dtype, meta=np.empty((0, 0), dtype=data.dtype))
        x = x - x.mean(axis=0)
        _, s, v = da.linalg.svd(x, coerce_signs=False)
        variance = (s[:count] ** 2 / (len(data) - 1)).map_blocks(to_host, dtype=data.dtype)
        components = v[:count].map_blocks(to_host, dtype=data.dtype)
        variance, components = dask.compute(variance, components)
    return components, variance


def largest_error(data: np.ndarray, components: np.ndarray, variance: np.ndarray) -> float:
    """Largest difference from scikit-learn's answer, in components (up to their sign) and relative in the variance."""
    truth = PCA(n_components=len(variance), svd_solver="full").fit(data)
    signs = np.sign((components * truth.components_).sum(axis=1, keepdims=True))
    return max(
        float(np.abs(signs * components - truth.components_).max()),
        float(np.abs(variance / truth.explained_variance_ - 1).max()),
    )


def print_plan(workers: dict[str, dict[str, Any]]) -> None:
    """Print the workers: the session's plan or, in a cluster of another kind, those of the scheduler."""
    try:
        from dask_gpu_mpi import current_session

        session = current_session()
    except (ImportError, ValueError):  # it is not installed, or this is not the script of its job
        session = None
    if session is not None:
        print(session.plan.table())
        print(f"ready after {session.ready_seconds:.2f} s")
        return
    for worker in sorted(workers.values(), key=lambda worker: str(worker["name"])):
        print(
            f"worker {worker['name']}: {worker['host']}, {worker['nthreads']} threads, {worker['resources']}"
        )


def main() -> int:
    """Connect, compute, compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--components", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest error allowed (default: 1e-6)")
    options = parser.parse_args()

    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        print_plan(workers)
        device = choose_device(workers, client)
        data = load_digits().data
        start = time.perf_counter()
        components, variance = principal_components(data, options.components, max(4, len(workers)), device)
        seconds = time.perf_counter() - start

    hosts = Counter(worker["host"] for worker in workers.values())
    error = largest_error(data, components, variance)
    share = variance.sum() / data.var(axis=0, ddof=1).sum()
    size = f"{data.shape[0]} x {data.shape[1]}"
    print(f"PCA of {size} digits on {device}s: {len(workers)} workers, {len(hosts)} host(s), {seconds:.2f} s")
    print(
        f"{len(variance)} components explain {share:.1%} of the variance: {np.array2string(variance, precision=2)}"
    )
    if not error <= options.tolerance:
        allowed = f"allowed {options.tolerance:.0e}"
        print(f"WRONG: differs from scikit-learn's PCA by {error:.2e}, {allowed}", file=sys.stderr)
        return 1
    print(f"same as scikit-learn's PCA: largest difference {error:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
