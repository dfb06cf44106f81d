"""The examples of the gallery that use a GPU by themselves, on real ones; those whose library is missing here are skipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.jobs.clusters import COMMAND
from support.jobs.gallery import EXAMPLES, right, skip_without
from support.jobs.mpi import Mpi

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def output(mpirun: Mpi, folder: Path, name: str, *packages: str) -> str:
    """What an example prints as a job of one rank with all GPUs."""
    skip_without(*EXAMPLES[name].packages, *packages)
    script = str(ROOT / "examples" / f"{name}.py")
    done = mpirun.run([*COMMAND, "--no-dashboard", *EXAMPLES[name].options, script], 1, cwd=folder)
    assert len(right(done.check().stdout)) == 1
    return done.stdout


@pytest.mark.parametrize(
    ("name", "packages", "says"),
    [
        ("cupy_arrays", ("cupy",), "cupy on worker"),
        ("dataframes", ("cudf",), "(?m)^right: .* with cudf$"),
        ("polars_query", ("cudf_polars",), "(?m)^right: .* on GPUs$"),
        ("cuml_kmeans", ("cuml", "raft_dask"), "(?m)^right: .* with cuML$"),
        ("xgboost_train", (), ""),
        ("cpu_and_gpu", (), r"loaded by \['0-cpu-0'\], computed by \['0-\d"),
    ],
)
def test_example(
    mpirun: Mpi, gpus: Any, tmp_path: Path, name: str, packages: tuple[str, ...], says: str
) -> None:
    told = output(mpirun, tmp_path, name, *packages)
    assert re.search(says, told)
    assert "numpy on worker" not in told


def test_on_each_gpu(mpirun: Mpi, gpus: Any, tmp_path: Path) -> None:
    used = set(re.findall(r"on (GPU-[\w-]+):", output(mpirun, tmp_path, "numba_kernel")))
    assert used == set(gpus.uuids)


def test_jax(mpirun: Mpi, gpus: Any, tmp_path: Path) -> None:
    told = output(mpirun, tmp_path, "jax_regression")
    assert told.count("JAX on gpu") == len(gpus.uuids)


def test_a_trial_for_each_gpu(mpirun: Mpi, gpus: Any, tmp_path: Path) -> None:
    assert output(mpirun, tmp_path, "hyperparameters").count("on worker 0-") == 9


def test_ddp(mpirun: Mpi, gpus: Any, tmp_path: Path) -> None:
    """By NCCL."""
    skip_without("torch")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA")
    assert "the losses of 20 epochs" in output(mpirun, tmp_path, "ddp_digits")
