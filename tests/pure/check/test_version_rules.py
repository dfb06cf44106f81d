"""The rules of a preflight about versions, and what is known not to work."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.check.tasks import NOT_INSTALLED, PYTHON
from dask_gpu_mpi.check.version_rules import KNOWN_BAD, known_bad
from support.mocks.preflights import VERSIONS, bad, evidence, inventory, observed


@pytest.mark.parametrize(
    ("name", "other", "level"),
    [
        ("dask-cuda", NOT_INSTALLED, "error"),
        (PYTHON, "3.13.1", "error"),
        (PYTHON, "3.12.8", "warning"),
        ("numpy", "2.0", "warning"),
    ],
)
def test_versions_that_differ(name: str, other: str, level: str) -> None:
    two = observed({name: other, "tornado": "6.9"})
    findings = {
        one.found.partition(" ")[0]: one for one in bad(evidence(ranks={1: two})) if one.what == "versions"
    }
    assert findings.keys() == {name.partition(" ")[0], "tornado"}
    finding = findings[name.partition(" ")[0]]
    assert finding.level == level
    assert finding.found.startswith(f"{name} differs")
    assert f"{other} for rank 1 on h2" in finding.found


@pytest.mark.parametrize(("more", "level"), [({}, "error"), ({"gpus": 0}, None)])
def test_known_issues_depend_on_gpus(more: dict[str, Any], level: str | None) -> None:
    nodes = [inventory(rank, **more) for rank in (0, 1)]
    ranks = dict.fromkeys((0, 1), observed({"dask-cuda": NOT_INSTALLED}))
    found = [one for one in bad(evidence(*nodes, ranks=ranks)) if one.what == "known versions"]
    assert [(one.level, one.ranks) for one in found] == [(level, (0, 1))] * (level is not None)


def test_what_is_newer_than_tested_is_a_warning() -> None:
    (found,) = bad(evidence(ranks=dict.fromkeys((0, 1), observed({"distributed": "2027.1.0"}))))
    assert (found.level, found.what, found.ranks) == ("warning", "known versions", (0, 1))
    assert found.found.startswith("distributed 2027.1.0 is newer than")
    assert found.fix == "if something fails, install one of these"


@pytest.mark.parametrize(
    ("versions", "gpus", "level", "says"),
    [
        ({"bokeh": "3.10.2", "distributed": "2026.7.1"}, False, "warning", "bokeh 3.10.2 with distributed 2026.7.1"),
        ({PYTHON: "3.12.2"}, False, "warning", "Python 3.12.2"),
        ({PYTHON: "3.14.0"}, False, "warning", "Python 3.14.0"),
        ({"cuda-bindings": NOT_INSTALLED}, True, "error", "no cuda-bindings"),
        ({"libucx-cu13": "1.22.0"}, False, "warning", "libucx-cu13 1.22.0"),
        ({"bokeh": "3.9.2"}, False, None, ""),
        ({"bokeh": "3.10.2", "distributed": "2026.8.0"}, False, None, ""),
        ({"bokeh": "unreadable"}, False, None, ""),
        ({PYTHON: "3.12.3"}, False, None, ""),
        ({PYTHON: "3.11.7", "libucx-cu13": "1.21.0", "cuda-bindings": NOT_INSTALLED}, False, None, ""),
    ],
)  # fmt: skip
def test_known_bad(versions: dict[str, str], gpus: bool, level: str | None, says: str) -> None:
    all_versions = VERSIONS | versions
    rows = known_bad(all_versions, gpus=gpus)
    assert [row.level for row in rows] == ([] if level is None else [level])
    assert all(says in row.name(all_versions) for row in rows)
    assert {name for row in KNOWN_BAD for name in row.versions} <= VERSIONS.keys()
