"""The options that a plan needs, out of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.model import PlacementOptions

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
