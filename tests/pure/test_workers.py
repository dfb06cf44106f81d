"""Workers from their lines of the plan."""

from __future__ import annotations

import os

import pytest

from dask_gpu_mpi.workers import visible_device, worker_class_for


def test_cpu_workers_beside_gpu_workers_are_nannies() -> None:
    pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
    import dask_cuda
    import distributed

    class Mine(dask_cuda.CUDAWorker):  # type: ignore[misc]
        pass

    for cls in ("auto", "dask_cuda.CUDAWorker", dask_cuda.CUDAWorker, Mine):
        assert worker_class_for("cpu", cls) is distributed.Nanny
        assert issubclass(worker_class_for("gpu", cls), dask_cuda.CUDAWorker)
    assert worker_class_for("cpu", "distributed.Worker") is distributed.Worker


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with visible_device("GPU-x"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
