"""The Slurm tier: a Slurm without cgroups and one with, each over three hosts of its own, for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.bed.slurm import Slurm, new_slurm


@pytest.fixture(scope="session")
def open_slurm() -> Iterator[Slurm]:
    """Jobs are confined by nothing."""
    with new_slurm(cgroups=False) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def confining_slurm() -> Iterator[Slurm]:
    """Processes, devices and memory of jobs are confined by cgroups."""
    with new_slurm(cgroups=True) as slurm:
        yield slurm


@pytest.fixture
def confined(confining_slurm: Slurm) -> Iterator[Slurm]:
    """For rows that need cgroups."""
    yield from used(confining_slurm)


@pytest.fixture
def slurm(open_slurm: Slurm) -> Iterator[Slurm]:
    """For rows to which cgroups do not matter."""
    yield from used(open_slurm)


@pytest.fixture(params=["open", "cgroups"])
def either(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """For rows with and without cgroups."""
    yield from used(request.getfixturevalue("open_slurm" if request.param == "open" else "confining_slurm"))


def used(slurm: Slurm) -> Iterator[Slurm]:
    """Its jobs do not outlive the test."""
    yield slurm
    slurm.end_jobs()
