"""The result of the preflight's kernel, with a mock of numba; tests/gpu has the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dask_gpu_mpi.check.kernel import run_kernels
from support.mocks.preflights import environ_with


def test_no_gpu_no_kernel() -> None:
    assert run_kernels([], {}, 1.0) == ()


@pytest.mark.parametrize(
    ("numba", "kind", "says"),
    [
        ("raise ImportError('no llvmlite')", "import", "no llvmlite"),
        ("import os; os.write(2, b'loading\\nBus error\\n'); os._exit(7)", "died", "exit code 7: Bus error"),
        ("import os; os._exit(7)", "died", "exit code 7: no error output"),
    ],
)
def test_what_it_prints_is_reported(tmp_path: Path, numba: str, kind: str, says: str) -> None:
    results = run_kernels(["GPU-a", "GPU-b"], environ_with("numba", numba, tmp_path), 60.0)
    assert [result.uuid for result in results] == ["GPU-a", "GPU-b"]
    for result in results:
        assert result.kind == kind
        assert says in result.text


def test_an_import_that_takes_too_long_is_not_a_late_kernel(tmp_path: Path) -> None:
    (result,) = run_kernels(["GPU-a"], environ_with("numba", "import time; time.sleep(60)", tmp_path), 0.5)
    assert (result.kind, result.text) == ("slow", "the import of numba took longer than 0 s")


#: A mock of numba.cuda: it runs the kernel in some of its threads only, and computes the rest itself.
CUDA = """
import os, time
import numpy as np

class DeviceArray(np.ndarray):
    copy_to_host = np.ndarray.copy

to_device = lambda x: x
device_array_like = lambda x: np.zeros_like(x).view(DeviceArray)
grid = lambda dimensions: _thread

def jit(function):
    class Kernel:
        def __getitem__(self, shape):
            blocks, threads = shape
            return lambda x, y: launch(blocks * threads, x, y)

    def launch(threads, x, y):
        global _thread
        assert threads == x.size and x[0] == threads - 1
        y[:] = 3 * x + np.arange(x.size)
        for _thread in (0, 1, threads // 2, threads - 1, threads):
            if _thread < threads:
                y[_thread] = -1
            function(x, y)
        ACTION

    return Kernel()
"""


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        ("pass", "", ""),
        ("y[5] += 1", "wrong", "1 of 1048576 elements are wrong"),
        ("raise RuntimeError('no  driver' + 'x' * 999)", "cuda", "RuntimeError: no driver" + "x" * 177),
        ("import sys; sys.exit('y' * 999)", "died", "exit code 1: " + "y" * 200),
        ("assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-a' and 'PMI_RANK' not in os.environ", "", ""),
    ],
)
def test_what_a_gpu_computes_is_checked(tmp_path: Path, action: str, kind: str, text: str) -> None:
    environ = environ_with("numba", "", tmp_path)
    (tmp_path / "numba" / "cuda.py").write_text(CUDA.replace("ACTION", action))
    (result,) = run_kernels(["GPU-a"], environ | {"PMI_RANK": "0"}, 60.0)
    assert (result.uuid, result.kind, result.text) == ("GPU-a", kind, text)
    assert 0 < result.seconds < 60
