"""The tasks of a check in this process, with mocks of numba and of the worker; tests/gpu has the real ones.

A numba that is missing or hangs: tests/mpi/test_check.py; the last look: tests/ucx.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.check import tasks
from dask_gpu_mpi.check.tasks import (
    NOT_INSTALLED,
    PYTHON,
    make_data,
    observe,
    pattern,
    receive,
    run_kernel,
    versions,
)
from support.mocks.preflights import gpu

numpy = pytest.importorskip("numpy")


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "" if name == "dask" else f"of {name}"  # a damaged one has none

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions()
    assert found[PYTHON] == platform.python_version()
    kinds = ["unknown", NOT_INSTALLED, "of distributed"]
    assert [found[name] for name in ("dask", "numpy", "distributed")] == kinds


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    made = SimpleNamespace(
        local_directory=str(tmp_path / "dgm-1" / "dask-scratch-space" / "worker-x"),
        scheduler_delay=-0.5,
        transfer_incoming_log=[],
    )
    monkeypatch.setattr(tasks, "_worker", lambda: made)
    return made


@pytest.mark.parametrize(("tmpdir_counts", "ignored"), [(True, "/not/there"), (False, "")])
def test_a_node(
    monkeypatch: pytest.MonkeyPatch,
    worker: SimpleNamespace,
    tmp_path: Path,
    tmpdir_counts: bool,
    ignored: str,
) -> None:
    monkeypatch.setenv("TMPDIR", "/not/there")
    monkeypatch.setattr(tasks, "gpu_health", lambda gpus: ("580.1", {one.uuid: 1 for one in gpus}))
    found = observe([gpu("h1", 0)], tmpdir_counts)
    assert (found.scratch.path, found.scratch.error, found.scratch.ignored) == (str(tmp_path), "", ignored)
    assert (found.driver, found.ecc, found.ahead) == ("580.1", {"GPU-h1-0": 1}, 0.5)
    assert observe([], tmpdir_counts).driver == ""


class MockCuda(ModuleType):
    """A mock of numba.cuda: it runs the kernel in some of its threads only, and computes the rest itself."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        super().__init__("numba.cuda")
        self.action = action
        self.used: list[int] = []
        self.thread = 0
        self.gpus = self

    def __getitem__(self, place: int) -> Any:
        self.used.append(place)
        return contextlib.nullcontext()

    def grid(self, dimensions: int) -> int:
        return self.thread

    def to_device(self, x: Any) -> Any:
        return x.view(DeviceArray)

    def device_array_like(self, x: Any) -> Any:
        return numpy.zeros_like(x).view(DeviceArray)

    def jit(self, function: Any) -> Any:
        def launch(x: Any, y: Any) -> None:
            y[:] = 3 * x + numpy.arange(x.size)
            for self.thread in (0, 1, x.size - 1, x.size):
                y[self.thread : self.thread + 1] = -1
                function(x, y)
            self.action(y)

        return defaultdict(lambda: launch)


class DeviceArray(numpy.ndarray):  # type: ignore[misc, name-defined]
    copy_to_host = numpy.ndarray.copy


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], MockCuda]:
    def make(action: Callable[[Any], None] = lambda y: None) -> MockCuda:
        made, numba = MockCuda(action), ModuleType("numba")
        numba.cuda = made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "numba", numba)
        monkeypatch.setitem(sys.modules, "numba.cuda", made)
        return made

    return make


def spoil(y: Any) -> None:
    y[5] += 1


def fail(y: Any) -> None:
    raise RuntimeError("no  driver" + "x" * 999)


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (lambda y: None, "", ""),
        (spoil, "wrong", "1 of 1048576 elements are wrong"),
        (fail, "cuda", "RuntimeError: no driver" + "x" * 174 + "..."),
    ],
)
def test_what_a_gpu_computes_is_checked(cuda: Any, action: Any, kind: str, text: str) -> None:
    mock = cuda(action)
    results = run_kernel(("GPU-a", "GPU-b"), 60)
    assert [(one.kind, one.text) for one in results.values()] == [(kind, text)] * 2
    assert [*results] == ["GPU-a", "GPU-b"]
    assert all(0 < one.seconds < 60 for one in results.values())
    assert mock.used == [0, 1]


def test_numba_that_fails_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise ValueError("no libcuda.so")

    monkeypatch.setattr(tasks.importlib, "import_module", fails)
    result = run_kernel(("GPU-a",), 60)["GPU-a"]
    assert (result.kind, result.text) == ("cuda", "ValueError: no libcuda.so")


@pytest.mark.parametrize("on_device", [True, False])
def test_data_that_are_received(worker: SimpleNamespace, cuda: Any, on_device: bool) -> None:
    cuda()
    data = make_data(7, 3000, on_device)
    assert hasattr(data, "copy_to_host") is on_device
    worker.transfer_incoming_log += [
        {"duration": 9.0, "keys": {"make_data-check-x-1": 3000}},
        {"duration": 0.5, "keys": {"make_data-check-x-2": 3000}},
        {"duration": 7.0, "keys": {"make_data-check-x-12": 3000}},
    ]
    found = receive(data, "make_data-check-x-2", 7)
    assert (found.seconds, found.on_device, found.right) == (0.5, on_device, True)
    assert receive(data, "make_data-check-x-3", 8) == tasks.Received(None, on_device, False)


def test_data_without_numpy(monkeypatch: pytest.MonkeyPatch, worker: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    data = make_data(7, 3000, False)
    assert isinstance(data, bytes)
    assert receive(data, "x", 7).right


def test_the_pattern_is_of_any_size() -> None:
    period = pattern(1, 1 << 20)
    assert pattern(1, (1 << 20) + 10) == period + period[:10]
    assert len(pattern(1, 10)) == 10
    assert pattern(1, 10) != pattern(2, 10)
