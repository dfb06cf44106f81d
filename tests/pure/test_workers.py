"""Workers from their lines of the plan."""

from __future__ import annotations

import asyncio
import os

import pytest

from dask_gpu_mpi.workers import stop_ticks, visible_device, worker_class_for


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


def test_a_server_without_ticks_runs_and_keeps_its_other_callbacks() -> None:
    from distributed.core import Server

    async def look() -> tuple[set[str], list[bool]]:
        server = Server({})
        before = set(server.periodic_callbacks)
        stop_ticks(server)
        await server
        server.start_periodic_callbacks()
        running = [callback.is_running() for callback in server.periodic_callbacks.values()]
        gone = before - set(server.periodic_callbacks)
        await server.close()
        return gone, running

    gone, running = asyncio.run(look())
    assert gone == {"tick", "ticks"}
    assert running == [True, True]
