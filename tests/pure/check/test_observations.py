"""What one rank observes for the preflight."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.check import observations as module
from dask_gpu_mpi.check.observations import (
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
    observe,
    versions,
)
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.options.model import Options


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "" if name == "dask" else f"of {name}"  # a damaged one has none

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions("MPI 9")
    assert (found[PYTHON], found[MPI_LIBRARY]) == (platform.python_version(), "MPI 9")
    names = ("dask", "numpy", "distributed")
    assert [found[name] for name in names] == ["unknown", NOT_INSTALLED, "of distributed"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            InputError("NVML failed", fix="reset it", where="rank 1 of 2 on h"),
            Problem("NVML failed", fix="reset it", what="GPUs"),
        ),
        (OSError("no /proc"), Problem("could not inspect this node (OSError: no /proc)", what="host")),
    ],
)
def test_node_that_can_not_be_inspected(
    monkeypatch: pytest.MonkeyPatch, error: Exception, problem: Problem
) -> None:
    """What is observed of one that can: tests/mpi/test_check.py."""

    def take_inventory(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module, "take_inventory", take_inventory)
    known = Problem("x", what="launcher")
    found = observe(1, 2, Options(), {}, "MPI", [known], lambda step: None)
    assert (found.inventory, found.problems) == (None, (known, problem))


@pytest.mark.parametrize(
    ("worker_class", "variables", "gpus"),
    [
        ("distributed.Nanny", {"SLURM_GPUS_ON_NODE": "2"}, 0),
        ("auto", {"SLURM_GPUS_ON_NODE": "2"}, 2),
        ("auto", {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ("auto", {"SLURM_GPUS_ON_NODE": "gpu:4"}, 0),
        ("auto", {"SLURM_GPUS_ON_NODE": "1" * 5000}, 0),
    ],
)
def test_gpus_are_not_counted_for_cpu_workers_nor_the_directory_of_the_user_ignored(
    tmp_path: Path, worker_class: str, variables: dict[str, str], gpus: int
) -> None:
    options = Options(worker_class=worker_class, local_directory=str(tmp_path), interface="ib0")
    environ = {"TMPDIR": "/not/there", **variables}
    found = observe(1, 2, options, environ, "MPI", [], lambda step: None)
    assert (found.allocated_gpus, found.wanted_interface) == (gpus, "ib0")
    assert (found.scratch.path, found.scratch.ignored) == (str(tmp_path), "")
