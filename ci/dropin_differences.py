"""Plugin for pytest (`ci/dropin.sh`): which of dask-mpi's tests fail here on purpose, and why; see docs/migration.md."""

from __future__ import annotations

import pytest

_EXIT_CODE = "a job of too few ranks exits with code 2, as all bad input does; dask-mpi's with 1"

#: Tests that fail. One that passes is a failure.
DIFFERENCES = {
    "test_execute.py::test_basic[1-1-0-True-1]": _EXIT_CODE,
    "test_execute.py::test_basic[1-0-0-True-1]": _EXIT_CODE,
}
#: Tests that would wait in vain, for a minute, instead of failing; they are not run.
LEFT_OUT = {
    "test_cli.py::test_basic[dask_cuda.CUDAWorker]": "CUDAWorkers are refused without GPUs, and are one for each GPU, not rank",
}
#: Of the version of dask-mpi that ci/dropin.sh takes.
TESTS = 25


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what differs, and see to it that nothing else is missing."""
    gone = ({*DIFFERENCES, *LEFT_OUT} - {item.nodeid for item in items}) or len(items) != TESTS
    if gone:
        raise pytest.UsageError(
            f"{len(items)} tests, {TESTS} expected; in ci/dropin_differences.py, but not there: {gone}"
        )
    for item in items:
        if item.nodeid in DIFFERENCES:
            item.add_marker(
                pytest.mark.xfail(strict=True, raises=AssertionError, reason=DIFFERENCES[item.nodeid])
            )
        elif item.nodeid in LEFT_OUT:
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT[item.nodeid]))
