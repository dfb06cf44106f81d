"""What a plan is made of."""

from __future__ import annotations

from dataclasses import replace

from dask_gpu_mpi.plan.model import WorkerPlan

WORKER = WorkerPlan("0-0", 0, "h1", "gpu", 0, "GPU-a", 1, 0, (0,), {"GPU": 1.0})


def test_the_devices_of_a_worker() -> None:
    assert WORKER.devices == ("GPU-a",)
    assert replace(WORKER, device="GPU-b,GPU-a").devices == ("GPU-b", "GPU-a")
    assert replace(WORKER, device=None).devices == ()
