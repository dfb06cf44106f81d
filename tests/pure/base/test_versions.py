"""The range of versions that is tested: in the code, in ci/versions.sh, in the metadata and in the documentation."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from dask_gpu_mpi.base.versions import TESTED, pin_warnings, untested
from support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
#: Each supported release of RAPIDS, the newest Dask that its dask-cuda allows, and its ucxx and distributed-ucxx.
RELEASES = re.findall(r"^\| (\d\d\.\d\d) \| ([\d.]+) \| ([\d.]+) \|$", INSTALL, re.MULTILINE)
#: What a release brings besides that an extra names, at its oldest and at its newest (resolved from the package index).
BESIDES = {
    "cuda-bindings": ("12.9.10", "13.5.0"),
    "cupy-cuda12x": ("13.6.0", "14.2.0"),
    "cupy-cuda13x": ("13.6.0", "14.2.0"),
    "libucx-cu12": ("1.19.0", "1.21.0"),
    "libucx-cu13": ("1.19.0", "1.21.0"),
    "numba": ("0.61.2", "0.64.0"),
    "numba-cuda": ("0.19.2", "0.30.4"),
}


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
        ("distributed", "2027.1.0", "newer"),
        ("distributed", "2025.9.0", "older"),
        ("dask-cuda", "26.12.0", "newer"),
        ("dask-cuda", "25.8.0", "older"),
        ("dask-cuda", "26.12.0a12", "newer"),
    ],
)
def test_outside_is_one_warning(name: str, version: str, word: str) -> None:
    (warning,) = map(str, untested({"distributed": "2026.7.1", "dask-cuda": "26.10.0", name: version}))
    assert warning.startswith(f"{name} {version} is {word} than")
    assert "Fix: " in warning


@pytest.mark.parametrize(("rapids", "dask", "ucxx"), RELEASES)
@pytest.mark.parametrize("extra", ["", "gpu", "cuda12", "cuda13"])
def test_pip_changes_nothing_beside_a_release_of_rapids(
    rapids: str, dask: str, ucxx: str, extra: str
) -> None:
    for text in PROJECT["dependencies"] + EXTRAS.get(extra, []):
        requirement = Requirement(text)
        of_rapids = {"dask-cuda": rapids, "rmm-cu12": rapids, "rmm-cu13": rapids, "distributed": dask}
        name = requirement.name
        if name.startswith("distributed-ucxx"):
            versions: tuple[str, ...] = (ucxx,)
        else:
            versions = (of_rapids[name],) if name in of_rapids else BESIDES.get(name, ())
        assert all(requirement.specifier.contains(version) for version in versions), (text, versions)


def test_dask_cuda_is_no_requirement() -> None:
    """It pins its Dask: a job on CPUs takes any."""
    names = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert not names & {"dask-cuda", "cuda-bindings", "numba"}
    assert "distributed" in names


def test_ci_runs_both_ends_and_one_in_the_middle() -> None:
    script = (ROOT / "ci" / "versions.sh").read_text(encoding="utf-8")
    run = re.findall(r'"rapids-([0-9.]+) ', script)
    known = [rapids for rapids, _, _ in RELEASES]
    assert TESTED["dask-cuda"] == (known[0], known[-1])
    assert TESTED["distributed"][0] == RELEASES[0][1]
    assert run[0] == known[0]
    assert run[-1] == known[-1]
    assert set(run[1:-1]) & set(known[1:-1])
    assert f'"dask-{TESTED["distributed"][1]} ' in script


def test_the_documentation_has_the_range() -> None:
    for name, ends in TESTED.items():
        assert f"{name} {ends[0]} to {ends[1]}" in INSTALL
