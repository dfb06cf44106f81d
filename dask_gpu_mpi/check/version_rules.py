"""The rules of `check` about versions: those that must be the same on all ranks, and those that are known to be bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dask_gpu_mpi.base.text import fold_names, ranks_text
from dask_gpu_mpi.base.versions import untested
from dask_gpu_mpi.check.report import Evidence, Finding
from dask_gpu_mpi.check.tasks import NOT_INSTALLED, PYTHON

#: In place of a specifier: the package is not installed.
MISSING = "missing"


@dataclass(frozen=True)
class KnownBad:
    """Versions that do not work together."""

    #: Name to PEP 440 specifier; all must fit. `MISSING`: it is not installed.
    versions: Mapping[str, str]
    level: Literal["warning", "error"]
    #: The effect for the user.
    effect: str
    fix: str
    #: Whether it matters only in jobs with GPUs.
    needs_gpus: bool = False

    def fits(self, versions: Mapping[str, str]) -> bool:
        """Whether these are among the versions."""
        return all(_fits(versions.get(name, NOT_INSTALLED), wanted) for name, wanted in self.versions.items())

    def name(self, versions: Mapping[str, str]) -> str:
        """The installed versions, for people: ``"bokeh 3.10.2 with distributed 2026.7.1"``."""
        parts = [
            f"no {name}" if wanted == MISSING else f"{name} {versions[name]}"
            for name, wanted in self.versions.items()
        ]
        return " with ".join(parts)


# fmt: off
KNOWN_BAD: tuple[KnownBad, ...] = (
    # github.com/dask/distributed/issues/9350
    KnownBad(
        {"bokeh": ">=3.10", "distributed": "<=2026.7.1"}, "warning",
        "Scheduler.close raises, so that other Dask clusters (LocalCluster, dask-mpi) fail or hang at their end; dask-gpu-mpi's "
        "own end normally",
        "pip install 'bokeh<3.10', or a newer distributed where RAPIDS allows it",
    ),
    # a thread started at exit: python/cpython#113964
    KnownBad(
        {PYTHON: ">=3.12,<3.12.3"}, "warning",
        "it can't start a thread at exit, so that dask-mpi and others hang there; dask-gpu-mpi does not",
        "use Python 3.12.3 or newer, or 3.11",
    ),
    KnownBad(
        {PYTHON: ">=3.14"}, "warning",
        "this is not tested, and Dask's warnings at the end of a job are not silenced",
        "use Python 3.11, 3.12 (from 3.12.3) or 3.13",
    ),
    KnownBad(
        {"dask-cuda": ">=0", "cuda-bindings": MISSING}, "error",
        "`import dask_cuda` fails: no GPU worker starts",
        "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], to match your driver",
        needs_gpus=True,
    ),
    KnownBad(
        {"dask-cuda": MISSING}, "error",
        "GPU workers need dask_cuda.CUDAWorker",
        "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], to match your driver",
        needs_gpus=True,
    ),
    *(
        KnownBad(
            {name: ">=1.22"}, "warning",
            "UCXX does not work with it: data between workers goes over TLS",
            f"pip install '{name}<1.22'",
        )
        for name in ("libucx-cu12", "libucx-cu13")
    ),
)
# fmt: on


def known_bad(versions: Mapping[str, str], *, gpus: bool) -> list[KnownBad]:
    """The rows that apply, in a job with or without GPUs.

    >>> [row.name({"bokeh": "3.10.2", "distributed": "2026.7.1"}) for row in
    ...  known_bad({"bokeh": "3.10.2", "distributed": "2026.7.1"}, gpus=False)]
    ['bokeh 3.10.2 with distributed 2026.7.1']
    """
    return [row for row in KNOWN_BAD if row.fits(versions) and (gpus or not row.needs_gpus)]


def _fits(version: str, wanted: str) -> bool:
    if wanted == MISSING:
        return version == NOT_INSTALLED
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except ValueError:  # `InvalidVersion`, or a number of thousands of digits
        return False


#: Versions that must not differ between processes that send each other tasks. Other differences may be harmless.
MUST_AGREE = frozenset(
    {"dask-gpu-mpi", "dask", "distributed", "dask-cuda", "mpi4py", "cloudpickle", "msgpack"}
)
#: Versions that `check` lists if there is no problem.
SHOWN = (PYTHON, "distributed", "dask-cuda")


def check_versions(evidence: Evidence) -> Iterator[Finding]:
    """Versions must not differ between ranks."""
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, observed in evidence.observations.items():
        for name, version in observed.versions.items():
            ranks_of.setdefault(name, {}).setdefault(version, []).append(rank)
    different = {name: ranks for name, ranks in ranks_of.items() if len(ranks) > 1}
    for name, ranks in different.items():
        bad = name in MUST_AGREE
        if name == PYTHON:  # functions are sent as byte code, which changes with the second number
            bad = len({version.rsplit(".", 1)[0] for version in ranks}) > 1
        found = "; ".join(
            f"{version} for {ranks_text(of)} on {fold_names(map(evidence.host, of))}"
            for version, of in ranks.items()
        )
        yield Finding(
            "error" if bad else "warning", "versions", f"{name} differs: {found}",
            "use the same environment on all nodes (a shared directory or one container image)",
        )  # fmt: skip
    if ranks_of and not different:
        shown = {name: version for name in SHOWN for version in ranks_of.get(name, ())}
        texts = ", ".join(f"{name} {version}" for name, version in shown.items())
        yield Finding("ok", "versions", f"{texts}; all versions are the same on all ranks")


def check_known_issues(evidence: Evidence) -> Iterator[Finding]:
    """Versions that are known to be bad in this job."""
    gpus = any(host.gpus for host in evidence.plan.hosts)
    found = [
        Finding(row.level, "known versions", f"{row.name(observed.versions)}: {row.effect}", row.fix, (rank,))
        for rank, observed in evidence.observations.items()
        for row in known_bad(observed.versions, gpus=gpus)
    ]
    for rank, observed in evidence.observations.items():
        for problem in untested(observed.versions):
            found.append(Finding.of("warning", "known versions", problem, ranks=(rank,)))
    yield from found or [Finding("ok", "known versions", "no version that is known to be bad")]
