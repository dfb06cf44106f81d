"""What one rank observes for the preflight."""

from __future__ import annotations

import importlib.metadata
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.check import observations as module
from dask_gpu_mpi.check.observations import (
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
    Observations,
    allocated_gpus,
    observe,
    versions,
)
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.options.model import Options
from support.mocks.preflights import observed

LAUNCHER = Problem("x", what="launcher")


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "gpu:4"}, 0),
        ({"SLURM_GPUS_ON_NODE": "1" * 5000}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_what_the_batch_system_has_allocated(environ: dict[str, str], number: int) -> None:
    assert allocated_gpus(environ) == number


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


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `observe` inspects, and what it asks for."""
    inventory = observed(0).inventory
    made = SimpleNamespace(inventory=inventory, raises=None, look_for_gpus=None, tmpdir="?", steps=[])

    def take_inventory(*_: Any, look_for_gpus: bool) -> Any:
        made.look_for_gpus = look_for_gpus
        if made.raises is not None:
            raise made.raises
        return made.inventory

    def inspect_scratch(path: str, tmpdir: str | None) -> Scratch:
        made.tmpdir = tmpdir
        return Scratch(path)

    monkeypatch.setattr(module, "take_inventory", take_inventory)
    monkeypatch.setattr(module, "inspect_scratch", inspect_scratch)
    monkeypatch.setattr(module, "gpu_health", lambda gpus: ("580.1", {gpu.uuid: 0 for gpu in gpus}))
    made.observe = lambda options, environ: observe(
        1, 2, options, environ, "MPI", [LAUNCHER], made.steps.append
    )
    return made


def test_what_is_observed(node: SimpleNamespace) -> None:
    found: Observations = node.observe(Options(interface="ib0"), {"TMPDIR": "/t", "SLURM_GPUS_ON_NODE": "2"})
    assert (found.rank, found.wanted_interface, found.driver, found.allocated_gpus) == (1, "ib0", "580.1", 2)
    assert found.ecc == {"GPU-h1-0": 0, "GPU-h1-1": 0}
    assert (node.look_for_gpus, node.tmpdir, found.problems) == (True, "/t", (LAUNCHER,))
    assert [step.split()[0] for step in node.steps] == ["inspecting", "inspecting", "reading"]


def test_what_is_observed_for_cpu_workers(node: SimpleNamespace) -> None:
    options = Options(worker_class="distributed.Nanny", local_directory="/mine")
    found: Observations = node.observe(options, {"TMPDIR": "/t", "SLURM_GPUS_ON_NODE": "2"})
    assert (node.look_for_gpus, node.tmpdir, found.allocated_gpus) == (False, None, 0)
    assert found.scratch.path == "/mine"
    node.inventory = observed(0, gpus=0).inventory  # and where there is no GPU
    found = node.observe(Options(), {})
    assert (found.driver, found.ecc) == ("", {})


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
def test_node_that_can_not_be_inspected(node: SimpleNamespace, error: Exception, problem: Problem) -> None:
    node.raises = error
    found: Observations = node.observe(Options(), {})
    assert (found.inventory, found.problems) == (None, (LAUNCHER, problem))
