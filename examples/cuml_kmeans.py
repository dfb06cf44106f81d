"""K-means on all GPUs of the job by cuML's own Dask estimator, or on one CPU worker by scikit-learn: ten clusters found again.

    dask-gpu-mpi launch -n 2 examples/cuml_kmeans.py

cuml.dask connects the workers by NCCL (raft-dask). Needs dask[array] and scikit-learn; on GPUs cuml, raft-dask and CuPy. Exit
code 1: other clusters were found.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client

CLUSTERS, ROWS, COLUMNS, PARTS = 10, 20_000, 8, 4
CENTRES = np.random.default_rng(0).uniform(-100, 100, size=(CLUSTERS, COLUMNS))


def points(seed: int) -> np.ndarray:
    """One part of the data: points around the centres; runs on a worker."""
    random = np.random.default_rng(seed)
    return CENTRES[random.integers(CLUSTERS, size=ROWS)] + random.normal(size=(ROWS, COLUMNS))


def on_cpu(data: np.ndarray) -> np.ndarray:
    """The centres by scikit-learn; runs on a worker."""
    from sklearn.cluster import KMeans

    found: np.ndarray = KMeans(CLUSTERS, n_init=4, random_state=0).fit(data).cluster_centers_
    return found


def on_gpus(client: Client, data: Any) -> np.ndarray:
    """The centres by cuML, on all workers together."""
    import cupy
    from cuml.dask.cluster import KMeans

    data = data.map_blocks(cupy.asarray, meta=cupy.empty((0, 0))).persist()
    model = KMeans(client=client, n_clusters=CLUSTERS, init="k-means||", random_state=0).fit(data)
    return cupy.asnumpy(model.cluster_centers_)


def main() -> int:
    """Fit, compare with the centres that the data was made from; return the exit code."""
    with Client() as client:
        shape = (ROWS, COLUMNS)
        parts = [
            da.from_delayed(delayed, shape, float) for delayed in client.map(points, range(PARTS), pure=False)
        ]
        data = da.concatenate(parts)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if all(worker["resources"].get("GPU") for worker in workers) and find_spec("cuml"):
            found, name = on_gpus(client, data), "cuML"
        else:
            found, name = client.submit(on_cpu, data.compute()).result(), "scikit-learn"
    distances = np.linalg.norm(CENTRES[:, None] - found[None], axis=2).min(axis=1)
    if not distances.max() < 0.2:
        print(f"WRONG: a centre is {distances.max():.2f} away from all that were found", file=sys.stderr)
        return 1
    print(f"right: {CLUSTERS} centres of {PARTS * ROWS} points found within 0.2, with {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
