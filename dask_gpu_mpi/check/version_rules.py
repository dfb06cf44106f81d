"""The rules of `check` about versions: which must be the same on all ranks, and which are known to be bad."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.hostlist import fold_names, ranks_text
from dask_gpu_mpi.base.versions import untested
from dask_gpu_mpi.options.protocols import Protocol

from .known_issues import known_bad
from .observations import MPI_LIBRARY, PYTHON
from .report import Evidence, Finding

__all__ = ["check_known_issues", "check_versions"]

#: What must not differ between processes that send each other tasks; of the rest a difference may be harmless.
MUST_AGREE = frozenset(
    {MPI_LIBRARY, "dask-gpu-mpi", "dask", "distributed", "dask-cuda", "mpi4py", "cloudpickle", "msgpack"}
)
#: What `check` names when all is well.
SHOWN = (PYTHON, "distributed", "dask-cuda", MPI_LIBRARY)


def check_versions(evidence: Evidence) -> Iterator[Finding]:
    """Versions must not differ between ranks."""
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, observed in evidence.observations.items():
        for name, version in observed.versions.items():
            ranks_of.setdefault(name, {}).setdefault(version, []).append(rank)
    different = {name: ranks for name, ranks in ranks_of.items() if len(ranks) > 1}
    for name, ranks in different.items():
        bad = name in MUST_AGREE
        if name == PYTHON:  # functions travel as byte code, which changes with the second number
            bad = len({version.rsplit(".", 1)[0] for version in ranks}) > 1
        found = "; ".join(
            f"{version} for {ranks_text(of)} on {fold_names(map(evidence.host, of))}"
            for version, of in ranks.items()
        )
        yield Finding(
            "error" if bad else "warning", "versions", f"{name} differs: {found}",
            "use the same environment on all nodes (a shared directory or one container image)",
        )  # fmt: skip
    if not different:
        shown = {name: version for name in SHOWN for version in ranks_of.get(name, ())}
        texts = (version if name == MPI_LIBRARY else f"{name} {version}" for name, version in shown.items())
        yield Finding("ok", "versions", f"{', '.join(texts)}; all versions are the same on all ranks")


def check_known_issues(evidence: Evidence) -> Iterator[Finding]:
    """Versions that are known to be bad in the circumstances of this job."""
    circumstances = frozenset(
        name
        for name, applies in (
            ("gpus", evidence.gpus),
            ("ucx", evidence.protocol == Protocol.UCX),
            ("hosts", len({observed.host for observed in evidence.observations.values()}) > 1),
        )
        if applies
    )
    found = [
        Finding(row.level, "known versions", f"{row.name(observed.versions)}: {row.effect}", row.fix, (rank,))
        for rank, observed in evidence.observations.items()
        for row in known_bad(observed.versions, circumstances)
    ]
    for rank, observed in evidence.observations.items():
        for text in untested(observed.versions):
            what, _, fix = text.partition(". Fix: ")
            found.append(Finding("warning", "known versions", what, fix, (rank,)))
    yield from found or [Finding("ok", "known versions", "no version that is known to be bad")]
