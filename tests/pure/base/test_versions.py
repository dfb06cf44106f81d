"""The range of versions that is tested: in the code, in ci/versions.sh, in the metadata and in the documentation."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.base.versions import TESTED, pin_warnings, untested
from support import ROOT


@pytest.mark.parametrize("name", TESTED)
def test_inside_of_the_range_and_without_a_version_there_is_no_warning(name: str) -> None:
    for version in (*TESTED[name], *(f"{end}.0" for end in TESTED[name]), "", "unknown"):
        assert untested({name: version}) == []
    for requirements in ([], ["not a requirement =="], ["distributed==2026.1.1", "bokeh<3"]):
        assert pin_warnings({"distributed": "2026.1.1", "dask-cuda": "26.6.0"}, requirements) == []


@pytest.mark.parametrize(
    ("name", "version", "word"),
    [
        ("distributed", "2026.9.0", "newer"),
        ("distributed", "2025.9.0", "older"),
        ("dask-cuda", "26.12.0a12", "newer"),
    ],
)
def test_outside_is_one_warning(name: str, version: str, word: str) -> None:
    (warning,) = map(str, untested({"distributed": "2026.7.1", "dask-cuda": "26.10.0", name: version}))
    assert warning.startswith(f"{name} {version} is {word} than")
    assert "Fix: " in warning


def test_the_documentation_has_the_range() -> None:
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for name, ends in TESTED.items():
        assert f"{name} {ends[0]} to {ends[1]}" in table
