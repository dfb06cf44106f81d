"""The command ``plan``, of hypothetical allocations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.nodes import svg
from dask_gpu_mpi.plan.planner import make_plan
from support.mocks.inputs import command

SHAPE = [
    "--nodes", "2", "--ranks-per-node", "2", "--gpus-per-node", "4", "--cpus-per-node", "8", "--memory-per-node", "64GiB",
]  # fmt: skip


plan = partial(command, "plan")


def test_the_shape_of_the_allocation_counts() -> None:
    made = json.loads(plan(*SHAPE, "--visible", "per-rank", "--json"))
    assert (made["world_size"], len(made["workers"])) == (4, 8)
    assert {host["memory"] for host in made["hosts"]} == {64 * 2**30}
    assert {cpu for worker in made["workers"] for cpu in worker["cpus"]} == set(range(8))
    assert "layout shared: 4 ranks on 2" in plan(*SHAPE)


def test_the_options_count() -> None:
    made = json.loads(
        plan(*SHAPE, "--layout", "exclusive", "--cpu-workers", "1", "--nthreads", "3", "--json")
    )
    assert (made["layout"], made["client"]["rank"]) == ("exclusive", 1)
    assert {worker["nthreads"] for worker in made["workers"] if worker["kind"] == "gpu"} == {3}
    assert [worker["host"] for worker in made["workers"] if worker["kind"] == "cpu"] == ["h2"]


def test_a_number_of_gpus_without_a_number_of_nodes() -> None:
    made = json.loads(plan("--gpus", "8", "--gpus-per-node", "5", "--ranks-per-node", "2", "--json"))
    places = [worker["host"] for worker in made["workers"]]
    assert (places.count("h1"), places.count("h2"), made["world_size"]) == (5, 3, 4)
    assert len(json.loads(plan("--gpus", "8", "--json"))["hosts"]) == 1


def test_the_picture(tmp_path: Path) -> None:
    made = make_plan(hypothetical_job(2, 1, 2), Options())
    picture = tmp_path / "plan.svg"
    picture.write_text("of another job")
    shape = ("--nodes", "2", "--gpus-per-node", "2", "--svg", str(picture))
    assert plan(*shape).rstrip("\n") == made.table()
    assert picture.read_text(encoding="utf-8") == svg(made)
    assert json.loads(plan(*shape, "--json")) == made.as_json()
    assert sorted(tmp_path.iterdir()) == [picture]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_plan_of_this_allocation(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 shows it."""
    made, asked = make_plan(hypothetical_job(2, 1, 2), Options()), []

    def planned(read_options: Callable[[], Options]) -> Plan | None:
        asked.append(read_options())
        return made if is_first else None

    monkeypatch.setattr("dask_gpu_mpi.job.start.plan_of_allocation", planned)
    assert plan("--nthreads", "3").rstrip("\n") == (made.table() if is_first else "")
    assert [options.nthreads for options in asked] == [3]
