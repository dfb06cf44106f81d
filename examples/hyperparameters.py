"""Hyper-parameters by trials in parallel, one for each GPU at a time: support vector machines on scikit-learn's digits.

    dask-gpu-mpi launch -n 2 examples/hyperparameters.py

A trial claims the resource of its worker, so that a GPU has one trial at a time; without GPUs a trial claims a CPU worker.
Results are printed as they come, and drawn at the end where matplotlib is installed. Exit code 1: the best trial can't be
repeated, or is worse than what is known of these data.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from itertools import product

import numpy as np
from distributed import Client, as_completed, get_worker
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

GRID = tuple(product((0.1, 1.0, 10.0), (0.0001, 0.001, 0.01)))  # C, gamma


def accuracy(cost: float, gamma: float) -> float:
    """Accuracy by cross-validation; the training of a network could be here: a worker sees its own GPU and no other."""
    digits = load_digits()
    return float(cross_val_score(SVC(C=cost, gamma=gamma), digits.data, digits.target, cv=3).mean())


def trial(cost: float, gamma: float) -> tuple[float, float, float, str]:
    """One pair of parameters, its accuracy, and where that was computed; runs on a worker."""
    return cost, gamma, accuracy(cost, gamma), str(get_worker().name)


def plot(results: list[tuple[float, float, float, str]], path: str) -> None:
    """Draw accuracy against gamma, a line for each C."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for cost in sorted({result[0] for result in results}):
        line = np.array(sorted(result[1:3] for result in results if result[0] == cost))
        pyplot.semilogx(line[:, 0], line[:, 1], "o-", label=f"C = {cost}")
    pyplot.xlabel("gamma")
    pyplot.ylabel("accuracy")
    pyplot.legend()
    pyplot.savefig(path)
    print(f"drawn: {path}")


def main() -> int:
    """Run all trials, repeat the best; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", default="trials.png", metavar="FILE", help="default: trials.png")
    options = parser.parse_args()
    results = []
    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        resource = "GPU" if any(worker["resources"].get("GPU") for worker in workers) else "CPU"
        trials = [client.submit(trial, *pair, resources={resource: 1}) for pair in GRID]
        for _, result in as_completed(trials, with_results=True):
            results.append(result)
            print("C = {:4}, gamma = {:6}: {:.4f} on worker {}".format(*result))
    if find_spec("matplotlib"):
        plot(results, options.plot)
    cost, gamma, best, _ = max(results, key=lambda result: result[2])
    if accuracy(cost, gamma) != best or best < 0.97 or len(results) != len(GRID):
        print(f"WRONG: {best:.4f} for C = {cost}, gamma = {gamma} is not repeated", file=sys.stderr)
        return 1
    print(f"right: of {len(results)} trials C = {cost}, gamma = {gamma} is the best, accuracy {best:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
