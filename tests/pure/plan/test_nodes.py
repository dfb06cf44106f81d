"""What the picture shows of each node, and which nodes share a box."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.plan.nodes import MOST_BOXES, MOST_WARNED, NodeBox, node_boxes
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support.mocks.inputs import GIB, gpu, one_host, plan, rank


def boxes_of(found: Plan) -> list[NodeBox]:
    boxes, left_out = node_boxes(found)
    assert left_out == ()
    return boxes


def with_gpus(inventory: Inventory, **change: Any) -> Inventory:
    return replace(inventory, gpus=tuple(replace(gpu, **change) for gpu in inventory.gpus))


def test_nodes_that_would_look_alike_share_a_box() -> None:
    job = list(hypothetical_job(40, 2, 4))
    # what real nodes of one kind differ in
    job[6] = replace(job[6], memory=job[6].memory - 4096)
    first, others = boxes_of(plan(job, name="x", cpu_workers=1))
    assert (first.title, first.roles) == ("h1", ("scheduler", "client"))
    assert (others.title, others.subtitle) == (
        "39 × h[2-40]",
        "ranks 2-79 · each 512 GiB, 4 GPUs",
    )
    assert [gpu.worker and gpu.worker.name for gpu in others.gpus] == [
        "x-<rank>-0",
        "x-<rank>-1",
        "x-<rank+1>-2",
        "x-<rank+1>-3",
    ]
    assert [worker.name for worker in others.cpu_workers] == ["x-<rank>-cpu-0"]


def test_what_is_special_is_apart() -> None:
    job = list(hypothetical_job(256, 1, 2))
    job[10] = with_gpus(job[10], processes=((99, 5 * GIB),))
    job[11] = replace(job[11], gpus=())
    job[12] = replace(job[12], warnings=(Problem("host h13: GPU 1 is left out", hosts=("h13",)),))
    boxes = boxes_of(plan(job, client_rank=255))
    assert [(box.title, box.roles, box.is_red) for box in boxes] == [
        ("h1", ("scheduler",), False),
        ("251 × h[2-10,14-255]", (), False),
        ("h11", (), True),
        ("h12", (), True),
        ("h13", (), True),
        ("h256", ("client",), False),
    ]
    assert {gpu.in_use for gpu in boxes[2].gpus} == {"5 GiB used by others"}
    assert boxes[3].alarms[0] == "no worker: rank 11"
    assert boxes[4].alarms == ("see warning 1",)


def test_ranks_without_a_worker_are_listed() -> None:
    boxes = boxes_of(plan(hypothetical_job(20, 2, 1)))
    assert [box.title for box in boxes] == ["h1", "19 × h[2-20]"]
    assert boxes[0].alarms[0] == "no worker: rank 1"
    assert boxes[1].alarms[0].startswith("no worker: ranks 3,5,7,")


def test_many_special_nodes_share_a_box_too() -> None:
    job = list(hypothetical_job(64, 1, 1))
    for number in range(10, 12 + MOST_WARNED):
        job[number] = with_gpus(job[number], processes=((99, number * GIB),))
    boxes = boxes_of(plan(job))
    assert [box.title for box in boxes] == ["h1", "53 × h[2-10,21-64]", "10 × h[11-20]"]
    assert [gpu.in_use for gpu in boxes[2].gpus] == ["in use by others"]
    assert boxes[2].alarms == ("see warnings 1-10",)


def test_of_nodes_that_all_differ_some_have_no_box() -> None:
    job = [replace(one, memory=(number + 1) * GIB) for number, one in enumerate(hypothetical_job(200, 1, 1))]
    job[150] = with_gpus(job[150], processes=((99, None),))
    boxes, left_out = node_boxes(plan(job, client_rank=199))
    titles = [box.title for box in boxes]
    assert len(titles) == MOST_BOXES
    assert {"h1", "h151", "h200"} <= set(titles)
    assert sorted([*titles, *left_out]) == sorted(one.host for one in job)


def test_a_warning_marks_all_of_its_nodes() -> None:
    job = [replace(one, contexts=("GPU 0",)) for one in hypothetical_job(40, 1, 1)]
    found = plan(job)
    assert "h8" in str(found.warnings[0])
    assert [(box.title, box.is_red) for box in boxes_of(found)] == [("h1", True), ("39 × h[2-40]", True)]
    found = plan(job[:2] + list(hypothetical_job(40, 1, 1))[2:])
    assert [box.title for box in boxes_of(found) if box.alarms] == ["h1", "h2"]


def test_a_worker_of_several_gpus_is_in_each() -> None:
    (box,) = boxes_of(plan(hypothetical_job(1, 1, 4), gpus_per_worker=2))
    assert [gpu.worker and gpu.worker.label for gpu in box.gpus] == [
        "0-0, device 0",
        "0-0, device 1",
        "0-2, device 0",
        "0-2, device 1",
    ]


@pytest.mark.parametrize(
    ("bound", "cores"), [((0, 1), "cores 0-1"), ((5,), "each its own cores"), ((), "each its own cores")]
)
def test_many_cpu_workers_of_a_node_share_a_box(bound: tuple[int, ...], cores: str) -> None:
    job = [rank(number, 20, cpus=bound if number == 3 else (0, 1)) for number in range(20)]
    (box,) = boxes_of(plan(job, nthreads=1))
    (worker,) = box.cpu_workers
    assert (worker.label, worker.cores) == ("20 workers: 0 … 19", cores)


def test_mig_instances_and_what_is_unknown() -> None:
    instance = gpu(3, uuid="MIG-1", parent="GPU-0003", slice=2, memory=0, processes=((99, None),))
    (box,) = boxes_of(plan(one_host((instance,), memory=0)))
    assert box.subtitle == "rank 0 · memory unknown, 1 GPU"
    (found,) = box.gpus
    assert (found.label, found.memory, found.in_use) == ("GPU 0 MIG 2", "", "in use by others")
    assert found.identity == "MIG-1, NVML index 3"
    assert found.cores == ""
    assert found.worker is not None
    assert found.worker.memory == "unlimited"
