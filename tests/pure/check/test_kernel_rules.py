"""The rules of a preflight about kernels on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.report import Outcome
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.errors import Problem
from support.mocks.preflights import bad, evidence, observed, only


@pytest.mark.parametrize("kind", ["import", "cuda", "wrong", "late", "died"])
def test_kernel_that_fails(kind: str) -> None:
    good = evidence()
    results = (KernelResult("GPU-h2-0", seconds=1.0), KernelResult("GPU-h2-1", kind, "what was seen"))
    tests = {**good.tests, 1: replace(good.tests[1], kernels=results)}
    finding = only(replace(good, tests=tests))
    assert (finding.what, finding.level, finding.ranks) == ("kernel", "error", (1,))
    assert finding.found == "failed on GPU-h2-1: what was seen"


def test_kernel_that_was_still_being_imported() -> None:
    good = evidence()
    slow = KernelResult("GPU-h2-1", "slow", "the import of numba took longer than 12 s")
    tests = {**good.tests, 1: replace(good.tests[1], kernels=(KernelResult("GPU-h2-0", seconds=1.0), slow))}
    finding = only(replace(good, tests=tests))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("kernel", "warning", (1,), ("h2",))
    assert (
        finding.found
        == "not run on GPU-h2-1: the import of numba took longer than 12 s; the file system is probably slow"
    )
    assert finding.fix


def test_kernel_that_was_not_run() -> None:
    good = evidence()
    without = {rank: replace(test, kernels=()) for rank, test in good.tests.items()}
    finding = only(replace(good, kernel=False, tests=without))
    assert (finding.what, finding.level) == ("kernel", "warning")
    problem = Problem("host h1: ranks see overlapping GPUs", fix="use --gpus-per-node")
    findings = bad(replace(good, plan=None, plan_problem=problem, tests=without))
    assert [(one.what, one.level) for one in findings] == [("placement", "error"), ("kernel", "warning")]
    assert findings[0].fix == "use --gpus-per-node"
    cpus = evidence(observed(0, gpus=0), observed(1, gpus=0))
    assert bad(cpus) == bad(replace(cpus, kernel=False)) == []


def test_kernels_that_are_correct() -> None:
    good = evidence()
    tests = {0: Outcome(kernels=(KernelResult("a", seconds=1.0), KernelResult("b", seconds=2.5)))}
    findings = apply_rules(replace(good, tests=tests))
    assert [one.found for one in findings if one.what == "kernel"] == [
        "correct result from 2 GPUs, after 2.5 s at most"
    ]


@pytest.mark.parametrize(
    ("gpus", "named"), [(4, "a, b, c, d"), (5, "a, b, c, d and 1 more"), (6, "a, b, c, d and 2 more")]
)
def test_failed_kernels_share_a_line(gpus: int, named: str) -> None:
    kernels = tuple(KernelResult(uuid, "cuda", "no driver") for uuid in "abcdef"[:gpus])
    found = replace(evidence(), tests={0: Outcome(kernels=kernels[:1]), 1: Outcome(kernels=kernels[1:])})
    finding = only(found)
    assert (finding.ranks, finding.found) == ((0, 1), f"failed on {named}: no driver")
