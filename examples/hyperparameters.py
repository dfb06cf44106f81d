"""Hyper-parameters by trials in parallel, one for each GPU at a time: XGBoost's trees on scikit-learn's digits.

    dask-gpu-mpi launch -n 2 examples/hyperparameters.py

A trial claims the resource of its worker, so that a GPU has one trial at a time; without GPUs it claims a thread of a worker.
Each is stopped early, when more trees do not help. Results are printed as they come, and drawn at the end if matplotlib is
installed. Exit code 1: the best trial can't be repeated, or its accuracy is too low for these data.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import product

import numpy as np
import xgboost
from distributed import Client, as_completed, get_worker
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GRID = tuple(product((2, 4, 6), (0.1, 0.3, 0.9)))  # depth of the trees, learning rate


def trial(depth: int, rate: float) -> tuple[int, float, float, int, str]:
    """One pair of parameters, its accuracy, after how many trees, and where; runs on a worker, which sees its own GPU only."""
    worker, digits = get_worker(), load_digits()
    gpu = worker.state.total_resources.get("GPU") and xgboost.build_info().get("USE_CUDA")
    device = "cuda" if gpu else "cpu"
    parts = train_test_split(digits.data, digits.target, random_state=0, stratify=digits.target)
    train, test = (xgboost.DMatrix(parts[i], parts[i + 2]) for i in (0, 1))
    parameters = {"max_depth": depth, "eta": rate, "objective": "multi:softmax", "num_class": 10}
    parameters |= {"eval_metric": "merror", "device": device, "nthread": 1}
    stop = {"evals": [(test, "test")], "early_stopping_rounds": 5}
    model = xgboost.train(parameters, train, 60, **stop, verbose_eval=False)
    return depth, rate, 1.0 - model.best_score, model.best_iteration + 1, str(worker.name)


def plot(results: list[tuple[int, float, float, int, str]]) -> None:
    """Draw accuracy against the learning rate, a line for each depth."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for depth in sorted({result[0] for result in results}):
        line = np.array(sorted(result[1:3] for result in results if result[0] == depth))
        pyplot.semilogx(line[:, 0], line[:, 1], "o-", label=f"depth {depth}")
    pyplot.xlabel("learning rate")
    pyplot.ylabel("accuracy")
    pyplot.legend()
    pyplot.savefig("trials.png")
    print("drawn: trials.png")


def main() -> int:
    """Run all trials, repeat the best; return the exit code."""
    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        claim = {"GPU" if any(worker["resources"].get("GPU") for worker in workers) else "CPU": 1}
        trials = [client.submit(trial, *pair, resources=claim) for pair in GRID]
        results = []
        for _, result in as_completed(trials, with_results=True):
            results.append(result)
            print("depth {}, rate {}: {:.4f} with {} trees on worker {}".format(*result))
        depth, rate, best, *_ = max(results, key=lambda result: (result[2], -result[0], -result[1]))
        again = client.submit(trial, depth, rate, resources=claim, pure=False).result()[2]
    if find_spec("matplotlib"):
        plot(results)
    if abs(again - best) > 0.01 or best < 0.95 or len(results) != len(GRID):
        print(
            f"WRONG: {best:.4f} for depth {depth}, rate {rate} is not repeated: {again:.4f}", file=sys.stderr
        )
        return 1
    print(f"right: of {len(results)} trials depth {depth}, rate {rate} is the best, accuracy {best:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
