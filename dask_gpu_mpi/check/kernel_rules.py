"""The rules of `check` about the kernel that each GPU runs."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.hostlist import counted
from dask_gpu_mpi.machine.nvml import INSPECT_COMMAND

from .report import LEAVE_OUT, Evidence, Finding

__all__ = ["check_kernels"]

#: UUIDs that one line names.
MOST_NAMED = 4
#: By `kernel.KernelResult.kind`.
FIXES = {
    "slow": "run check again, now that these files are in the node's page cache; or keep the environment on a faster file "
    "system, or in a container image",
    "import": "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], to match your driver",
    "cuda": f"run {INSPECT_COMMAND} on that node: the driver must be loaded, and as new as the CUDA that is installed "
    "(dask-gpu-mpi[cuda12] or [cuda13])",
    "wrong": LEAVE_OUT,
    "late": f"run {INSPECT_COMMAND} on that node; {LEAVE_OUT}",
    "died": f"run `python -c 'from numba import cuda; cuda.current_context()'` there; {LEAVE_OUT}",
}


def check_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Each GPU with a worker must compute the right result in time."""
    results = [(rank, result) for rank, test in evidence.tests.items() for result in test.kernels]
    if not evidence.kernel or not results:
        if evidence.gpus:
            yield Finding("warning", "kernel", _not_run(evidence.kernel))
        return
    failures: dict[tuple[str, str], dict[str, int]] = {}
    for rank, result in results:
        if result.kind:
            failures.setdefault((result.kind, result.text), {})[result.uuid] = rank
    for (kind, text), rank_of in failures.items():
        uuids = list(rank_of)
        more = f" and {len(uuids) - MOST_NAMED} more" if len(uuids) > MOST_NAMED else ""
        named = ", ".join(uuids[:MOST_NAMED]) + more
        ranks = tuple(dict.fromkeys(rank_of.values()))
        if kind == "slow":  # nothing has run on the GPU
            found = f"not run on {named}: {text}; the file system is probably slow"
            yield Finding("warning", "kernel", found, FIXES[kind], ranks)
        else:
            yield Finding("error", "kernel", f"failed on {named}: {text}", FIXES[kind], ranks)
    if not failures:
        slowest = max(result.seconds for _, result in results)
        gpus = counted(len(results), "GPU")
        yield Finding("ok", "kernel", f"correct result from {gpus}, after {slowest:.1f} s at most")


def _not_run(wanted: bool) -> str:
    if wanted:
        return "not run: there is no plan that assigns the GPUs to ranks"
    return "not run (--no-kernel): whether these GPUs compute is unknown"
