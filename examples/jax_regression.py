"""JAX on each worker's GPU: a regression on scikit-learn's diabetes data, checked against NumPy.

    dask-gpu-mpi launch -n 2 --worker-options '{"env": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}' examples/jax_regression.py

JAX takes three quarters of a GPU's memory at its first call, unless its variables say otherwise, and reads them once: they
must be set before a worker imports it. `env` does that; without it, a line says so. Exit code 1: the answer differs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from distributed import Client
from sklearn.datasets import load_diabetes

VARIABLES = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def derivatives(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Gradient and Hessian of the squared error at 0, over a part of the data, and the device; runs on a worker."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def loss(weights: Any) -> Any:
        return jnp.sum((jnp.asarray(x) @ weights - jnp.asarray(y)) ** 2)

    start = jnp.zeros(x.shape[1])
    gradient, hessian = jax.jit(jax.grad(loss))(start), jax.jit(jax.hessian(loss))(start)
    return np.asarray(gradient), np.asarray(hessian), jax.default_backend()


def settings() -> dict[str, str]:
    """What a worker's process has of JAX's memory settings; runs there."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def main() -> int:
    """A step of Newton's method, which is all that a squared error needs; return the exit code."""
    diabetes = load_diabetes()
    x = np.column_stack([np.ones(len(diabetes.target)), diabetes.data])
    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        on_workers = client.run(settings)
        if not all(on_workers.values()):
            why = f"no worker-option env with {' or '.join(VARIABLES)}"
            print(
                f"JAX takes most of a GPU's memory: {why}. Fix: the command at the top of this file",
                file=sys.stderr,
            )
        with_gpu = [address for address, worker in workers.items() if worker["resources"].get("GPU")]
        chosen = with_gpu or list(workers)
        parts = zip(np.array_split(x, len(chosen)), np.array_split(diabetes.target, len(chosen)), strict=True)
        tasks = [
            client.submit(derivatives, *part, workers=address)
            for part, address in zip(parts, chosen, strict=True)
        ]
        found = client.gather(tasks)
    for (_, _, backend), address in zip(found, chosen, strict=True):
        print(f"worker {workers[address]['name']}: JAX on {backend}, {on_workers[address]}")
    weights = -np.linalg.solve(sum(part[1] for part in found), sum(part[0] for part in found))
    truth = np.linalg.lstsq(x, diabetes.target, rcond=None)[0]
    error = np.abs(weights - truth).max() / np.abs(truth).max()
    if not error < 1e-9:
        print(f"WRONG: the weights differ from NumPy's by {error:.2e}", file=sys.stderr)
        return 1
    print(f"right: the {len(weights)} weights of the regression are those of NumPy's least squares")
    return 0


if __name__ == "__main__":
    sys.exit(main())
