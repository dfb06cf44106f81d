"""The rule of `check` about UCX between workers."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.startup.transport import choose_transport

from .report import Evidence, Finding, split_fix

__all__ = ["check_transport"]

FIX = "run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"

BETWEEN_FIX = (
    "open the nodes' TCP ports to each other, or set UCX_NET_DEVICES to their network (docs/transports.md)"
)


def check_transport(evidence: Evidence) -> Iterator[Finding]:
    """What workers will send each other over UCX, and whether UCX works on and between nodes; nothing where UCX is not wanted."""
    if evidence.plan is None or evidence.worker_ucx is WorkerUcx.OFF:
        return
    try:
        chosen, line, warning, between_nodes = choose_transport(
            evidence.worker_ucx, evidence.plan, evidence.abilities
        )
    except InputError as refused:
        yield Finding("error", "transport", *split_fix(str(refused), FIX))
        return
    if chosen is WorkerUcx.OFF:
        if line:
            yield Finding("warning", "transport", *split_fix(line, FIX))
        return
    if warning:
        yield Finding("warning", "transport", *split_fix(warning, FIX))
    results = {rank: test.ucx for rank, test in evidence.tests.items() if test.ucx is not None}
    failed = False
    for rank, result in results.items():
        if result.error:
            failed = True
            found = f"UCX does not work: {result.error}; data to and from workers there goes over TLS"
            yield Finding("warning", "transport", found, FIX, (rank,))
        for host, error in result.between:
            failed = True
            found = f"UCX does not work to {host}: {error}; data between these nodes goes over TLS"
            yield Finding("warning", "transport", found, BETWEEN_FIX, (rank,))
    if not failed:
        where = f"within {len(results)} node{'s' * (len(results) > 1)}"
        if between_nodes and len(results) > 1:
            where += " and from each to the next"
        yield Finding("ok", "transport", f"{line}; UCX works {where}")
