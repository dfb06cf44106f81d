"""What one rank observes for the preflight."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest

from dask_gpu_mpi.check.observations import (
    DISTRIBUTIONS,
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
    allocated_gpus,
    versions,
)


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_GPUS_ON_NODE": "gpu:4"}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_what_the_batch_system_has_allocated(environ: dict[str, str], number: int) -> None:
    assert allocated_gpus(environ) == number


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions("MPI 9")
    assert (found[PYTHON], found[MPI_LIBRARY]) == (platform.python_version(), "MPI 9")
    assert found.keys() == {PYTHON, MPI_LIBRARY, *DISTRIBUTIONS}
    assert found["distributed"] == importlib.metadata.version("distributed")

    def version(name: str) -> str:
        if name == "dask":
            return ""  # a damaged one has none
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions("MPI 9")
    assert (found["dask"], found["distributed"]) == ("unknown", NOT_INSTALLED)
