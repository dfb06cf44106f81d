"""The rules of a preflight about versions."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.check.observations import MPI_LIBRARY, NOT_INSTALLED, PYTHON
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.options.protocols import Protocol
from support.mocks.preflights import bad, evidence, observed


@pytest.mark.parametrize(
    ("name", "other", "level"),
    [
        ("distributed", "2026.1.0", "error"),
        ("dask-cuda", NOT_INSTALLED, "error"),
        (MPI_LIBRARY, "MPICH Version: 5.0.2", "error"),
        (PYTHON, "3.13.1", "error"),
        (PYTHON, "3.12.8", "warning"),
        ("numpy", "2.0", "warning"),
    ],
)
def test_versions_that_differ(name: str, other: str, level: str) -> None:
    two = observed(1, versions={name: other})
    finding = next(one for one in bad(evidence(observed(0), two)) if one.what == "versions")
    assert finding.level == level
    assert finding.found.startswith(f"{name} differs")
    assert f"{other} for rank 1 on h2" in finding.found


def test_versions_that_agree_are_named() -> None:
    found = {finding.what: finding.found for finding in apply_rules(evidence())}
    assert found["versions"] == (
        "Python 3.12.9, distributed 2026.7.1, dask-cuda 26.10.0, Open MPI v5.0.11; all versions are the same on all ranks"
    )


def test_versions_that_differ_are_all_named() -> None:
    two = observed(1, versions={"numpy": "2.0", "tornado": "6.9"})
    findings = [one for one in apply_rules(evidence(observed(0), two)) if one.what == "versions"]
    assert [(one.level, one.found.partition(" ")[0]) for one in findings] == [
        ("warning", "tornado"),
        ("warning", "numpy"),
    ]


@pytest.mark.parametrize(
    ("hosts", "protocol", "known"),
    [
        (("h1", "h2"), Protocol.UCX, True),
        (("h1", "h1"), Protocol.UCX, False),
        (("h1", "h2"), Protocol.TLS, False),
    ],
)
def test_known_issues_depend_on_nodes_and_protocol(
    hosts: tuple[str, str], protocol: Protocol, known: bool
) -> None:
    both = [observed(rank, versions={"libucx-cu13": "1.21"}, host=host) for rank, host in enumerate(hosts)]
    found = evidence(*both, protocol=protocol)
    assert [one.what for one in bad(found)] == (["known versions"] if known else [])


@pytest.mark.parametrize("gpus", [0, 2])
def test_known_issues_depend_on_gpus(gpus: int) -> None:
    both = [observed(rank, versions={"dask-cuda": NOT_INSTALLED}, gpus=gpus) for rank in (0, 1)]
    found = [one for one in bad(evidence(*both)) if one.what == "known versions"]
    assert [(one.level, one.ranks) for one in found] == ([("error", (0, 1))] if gpus else [])


def test_what_is_newer_than_tested_is_a_warning() -> None:
    both = [observed(rank, versions={"distributed": "2027.1.0"}) for rank in (0, 1)]
    (found,) = bad(evidence(*both))
    assert (found.level, found.what, found.ranks) == ("warning", "known versions", (0, 1))
    assert found.found.startswith("distributed 2027.1.0 is newer than")
    assert found.fix == "if something fails, install one of these"
