"""What a plan is made of."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import PlacementOptions, WorkerPlan, placement_options

WORKER = WorkerPlan("0-0", 0, "h1", "gpu", 0, "GPU-a", 1, 0, (0,), {"GPU": 1.0})
#: A value that is not the default.
OTHER: dict[str, Any] = {
    "layout": "exclusive",
    "cpu_workers": 2,
    "gpus_per_worker": 4,
    "require_idle_gpus": True,
    "nthreads": 3,
    "memory_limit": "4GB",
    "name": "mine",
    "scheduler_rank": 5,
    "client_rank": 6,
}


def test_the_devices_of_a_worker() -> None:
    assert WORKER.devices == ("GPU-a",)
    assert replace(WORKER, device="GPU-b,GPU-a").devices == ("GPU-b", "GPU-a")
    assert replace(WORKER, device=None).devices == ()


def test_the_defaults_are_a_worker_on_every_gpu() -> None:
    default = PlacementOptions()
    assert (default.layout, default.worker_kind, default.gpus_per_worker) == ("shared", "auto", 1)
    assert (default.cpu_workers, default.nthreads, default.memory_limit) == (0, None, "auto")
    assert (default.scheduler_rank, default.client_rank) == (0, None)


@pytest.mark.parametrize("name", OTHER)
def test_what_was_said_arrives(name: str) -> None:
    made = placement_options(Options(**{name: OTHER[name]}))
    assert made == PlacementOptions(**{name: OTHER[name]})


def test_nothing_is_forgotten() -> None:
    # the kind comes from the class, the scheduler from an option of another name, the client from who asks
    others = {"worker_kind", "has_scheduler", "has_client"}
    assert {field.name for field in fields(PlacementOptions)} == OTHER.keys() | others


def test_what_has_another_name() -> None:
    assert placement_options(Options(worker_class="distributed.Nanny")).worker_kind == "cpu"
    assert not placement_options(Options(scheduler=False)).has_scheduler
    assert placement_options(Options(name="mine"), name="given").name == "given"
