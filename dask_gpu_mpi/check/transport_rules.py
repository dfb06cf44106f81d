"""The rule of `check` about UCX between workers."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.hostlist import counted
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.startup.transport import choose_ucx

from .report import Evidence, Finding, split_fix

__all__ = ["check_transport"]

FIX = "run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"


def check_transport(evidence: Evidence) -> Iterator[Finding]:
    """What workers will send each other over UCX, and whether UCX works on each node; nothing where UCX is not wanted."""
    if evidence.plan is None or evidence.worker_ucx is WorkerUcx.OFF:
        return
    obstacles = {rank: observed.without_ucx for rank, observed in evidence.observations.items()}
    try:
        chosen, line = choose_ucx(evidence.worker_ucx, evidence.plan, obstacles)
    except InputError as refused:
        yield Finding("error", "transport", *split_fix(str(refused), FIX))
        return
    if chosen is WorkerUcx.OFF:
        if line:
            yield Finding("warning", "transport", *split_fix(line, FIX))
        return
    failed = {rank: test.ucx.error for rank, test in evidence.tests.items() if test.ucx and test.ucx.error}
    for rank, error in failed.items():
        found = f"UCX does not work: {error}; data to and from workers there goes over TLS"
        yield Finding("warning", "transport", found, FIX, (rank,))
    if not failed:
        tried = counted(sum(test.ucx is not None for test in evidence.tests.values()), "node")
        yield Finding("ok", "transport", f"{line}; UCX works within {tried}")
