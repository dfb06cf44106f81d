"""The rule of `check` about UCX between workers."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.startup.transport import choose_ucx

from .report import Evidence, Finding, split_fix

__all__ = ["check_transport"]

FIX = "choose what to do without UCX, --protocol tls, or find out what it needs: UCX_LOG_LEVEL=info, and docs/transports.md"


def check_transport(evidence: Evidence) -> Iterator[Finding]:
    """What workers will send each other over UCX, and whether UCX works on each node; nothing where UCX is not wanted."""
    if evidence.plan is None or evidence.worker_ucx is WorkerUcx.OFF:
        return
    obstacles = {rank: observed.without_ucx for rank, observed in evidence.observations.items()}
    if evidence.worker_ucx is WorkerUcx.ALL:
        for rank, text in obstacles.items():
            if text:
                yield Finding("error", "transport", *split_fix(text, FIX), (rank,))
    chosen, line = choose_ucx(evidence.worker_ucx, evidence.plan, obstacles)
    failed = {rank: test.ucx.error for rank, test in evidence.tests.items() if test.ucx and test.ucx.error}
    for rank, error in failed.items():
        found = f"UCX does not work: {error}; data to and from workers there goes over TLS"
        yield Finding("warning", "transport", found, FIX, (rank,))
    if not line or failed or (any(obstacles.values()) and evidence.worker_ucx is WorkerUcx.ALL):
        return
    if chosen is WorkerUcx.OFF:
        yield Finding("warning", "transport", *split_fix(line, FIX))
    else:
        tried = sum(test.ucx is not None for test in evidence.tests.values())
        yield Finding(
            "ok",
            "transport",
            line + (f"; UCX works on {tried} of {len(evidence.by_host())} nodes" if tried else ""),
        )
