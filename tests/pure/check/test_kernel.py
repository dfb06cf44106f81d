"""The result of the preflight's kernel, with a mock of numba; tests/gpu has the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dask_gpu_mpi.check.kernel import run_kernels


def environ_with(numba: str, folder: Path) -> dict[str, str]:
    (folder / "numba").mkdir()
    (folder / "numba" / "__init__.py").write_text(numba)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def test_no_gpu_no_kernel() -> None:
    assert run_kernels([], {}, 1.0) == ()


@pytest.mark.parametrize(
    ("numba", "kind", "says"),
    [
        ("raise ImportError('no llvmlite')", "import", "no llvmlite"),
        ("import os, sys; print('Bus error', file=sys.stderr, flush=True); os._exit(7)", "died", "Bus error"),
        ("import os; os._exit(7)", "died", "exit code 7: no error output"),
    ],
)
def test_what_it_prints_is_reported(tmp_path: Path, numba: str, kind: str, says: str) -> None:
    results = run_kernels(["GPU-a", "GPU-b"], environ_with(numba, tmp_path), 60.0)
    assert [result.uuid for result in results] == ["GPU-a", "GPU-b"]
    for result in results:
        assert result.kind == kind
        assert says in result.text


def test_an_import_that_takes_too_long(tmp_path: Path) -> None:
    (result,) = run_kernels(["GPU-a"], environ_with("import time; time.sleep(600)", tmp_path), 0.5)
    assert result.kind == "slow"
    assert result.seconds >= 0.5
