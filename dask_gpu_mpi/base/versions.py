"""The versions of Dask and RAPIDS that are tested, and warnings if others are installed.

dask-cuda pins its Dask (through rapids-dask-dependency), so a release of RAPIDS determines both (tests/pure/base/test_versions).
``ci/versions.sh`` runs the oldest release, one in the middle, the newest, and the newest Dask with CPU workers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping

from dask_gpu_mpi.errors import Problem

#: The oldest and the newest, by distribution. The newest distributed is tested with CPU workers only.
TESTED = {"distributed": ("2025.9.1", "2026.8"), "dask-cuda": ("25.10", "26.10")}


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed, from their metadata: importing them would take a second."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name) or "unknown"  # damaged metadata has no version
    return found


def documentation() -> str:
    """The address of the documentation, from this package's metadata; empty: it has none."""
    from importlib.metadata import PackageNotFoundError, metadata

    with contextlib.suppress(PackageNotFoundError):
        for line in metadata("dask-gpu-mpi").get_all("Project-URL") or ():
            name, _, address = line.partition(", ")
            if name == "Documentation":
                return str(address).rstrip("/")
    return ""


def untested(versions: Mapping[str, str]) -> list[Problem]:
    """Warnings about installed versions (by distribution) outside of the tested range, which includes patch releases.

    >>> print(*untested({"distributed": "2026.9.0"}))
    distributed 2026.9.0 is newer than the versions this package is tested with (expected 2025.9.1 to 2026.8). \
Fix: if something fails, install one of these
    >>> untested({"distributed": "2026.8.1", "dask-cuda": "26.10.0"})
    []
    """
    found = []
    for name, (oldest, newest) in TESTED.items():
        version = versions.get(name, "")
        numbers = _numbers(version)
        if not numbers:
            continue
        newer = numbers[:2] > _numbers(newest)[:2]
        if newer or numbers < _numbers(oldest):
            age = "newer" if newer else "older"
            problem = Problem(
                f"{name} {version} is {age} than the versions this package is tested with",
                expected=f"{oldest} to {newest}",
                fix="if something fails, install one of these",
            )
            found.append(problem)
    return found


def pin_warnings(versions: Mapping[str, str], requirements: Iterable[str]) -> list[Problem]:
    """A warning if the installed distributed does not match dask-cuda, by the requirements of rapids-dask-dependency.

    >>> print(*pin_warnings({"distributed": "2026.8.0", "dask-cuda": "26.6.0"}, ["dask==2026.1.1", "distributed==2026.1.1"]))
    distributed 2026.8.0 does not match dask-cuda 26.6.0 (expected distributed==2026.1.1). \
Fix: pip install 'distributed==2026.1.1'
    """
    from packaging.requirements import Requirement

    with contextlib.suppress(ValueError):  # an invalid requirement
        for requirement in map(Requirement, requirements):
            if requirement.name == "distributed" and not requirement.specifier.contains(
                versions["distributed"], prereleases=True
            ):
                text = f"distributed{requirement.specifier}"
                found = (
                    f"distributed {versions['distributed']} does not match dask-cuda {versions['dask-cuda']}"
                )
                return [Problem(found, expected=text, fix=f"pip install '{text}'")]
    return []


def _numbers(version: str) -> tuple[int, ...]:
    """The release segment, such as ``(2026, 8, 0)``; empty if there is none."""
    found = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*(?![0-9])", version)
    return tuple(map(int, found[0].split("."))) if found else ()
