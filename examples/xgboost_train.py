"""XGBoost over all workers, on their GPUs if it can, and a scikit-learn estimator through joblib, on real data.

    dask-gpu-mpi launch -n 2 examples/xgboost_train.py

Needs xgboost (or xgboost-cpu), dask[dataframe] and scikit-learn, whose breast cancer data (569 patients) are classified. Exit
code 1: the score is not what these data give, or the forest differs from one that is grown without Dask.
"""

from __future__ import annotations

import sys
from typing import Any

import dask.array as da
import joblib
import numpy as np
import xgboost
from distributed import Client
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from xgboost import dask as dxgb

GOOD = 0.93  # accuracy on patients that were not trained with


def choose_device(client: Client) -> str:
    """Return "cuda" when every worker has a GPU and XGBoost is built for it, else "cpu"."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    with_gpus = all(worker["resources"].get("GPU") for worker in workers)
    return "cuda" if with_gpus and xgboost.build_info().get("USE_CUDA") else "cpu"


def boosted(client: Client, x: Any, y: Any, x_test: Any, device: str) -> np.ndarray:
    """Train on the workers, each with its part of the rows, and predict."""
    rows = -(-len(x) // max(2, len(client.scheduler_info(n_workers=-1)["workers"])))
    train = dxgb.DaskDMatrix(
        client, da.from_array(x, chunks=(rows, x.shape[1])), da.from_array(y, chunks=rows)
    )
    parameters = {"objective": "binary:logistic", "tree_method": "hist", "device": device, "seed": 0}
    model = dxgb.train(client, parameters, train, num_boost_round=50)
    return np.asarray(dxgb.predict(client, model, da.from_array(x_test, chunks=x_test.shape)).compute() > 0.5)


def forest(x: Any, y: Any, x_test: Any, backend: str) -> np.ndarray:
    """A random forest whose trees are tasks of joblib's: threads here, or tasks of the cluster."""
    with joblib.parallel_config(backend=backend):
        return RandomForestClassifier(50, n_jobs=-1, random_state=0).fit(x, y).predict(x_test)


def main() -> int:
    """Train, score, compare; return the exit code."""
    patients = load_breast_cancer()
    x, x_test, y, y_test = train_test_split(
        patients.data, patients.target, random_state=0, stratify=patients.target
    )
    with Client() as client:
        device = choose_device(client)
        score = float((boosted(client, x, y, x_test, device) == y_test).mean())
        print(f"XGBoost {xgboost.__version__} on {device}: accuracy {score:.3f} on {len(y_test)} patients")
        trees = forest(x, y, x_test, "dask")
    same = bool((trees == forest(x, y, x_test, "threading")).all())
    print(f"random forest through joblib: accuracy {(trees == y_test).mean():.3f}")
    if score < GOOD or not same:
        print(f"WRONG: accuracy {score:.3f} (expected {GOOD}), forests are the same: {same}", file=sys.stderr)
        return 1
    print(f"right: XGBoost's accuracy is above {GOOD}, and the forest is the one grown without Dask")
    return 0


if __name__ == "__main__":
    sys.exit(main())
