"""The line of `check` about UCX between workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.check.coordinator import _tries_of_ucx
from dask_gpu_mpi.check.report import Evidence, Finding, Outcome
from dask_gpu_mpi.check.rules import check_transport
from dask_gpu_mpi.check.ucx import UcxResult
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.protocols import WorkerUcx
from support.mocks.preflights import evidence, observed

MISSING = Problem("distributed-ucxx is not installed", fix="pip install it")


def two_nodes(ucx: WorkerUcx, *, gpus: bool = True, without: Problem | None = None, **more: Any) -> Evidence:
    found = [observed(0, gpus=int(gpus)), observed(1, gpus=int(gpus), ucx=UcxAbility(without))]
    return evidence(*found, worker_ucx=ucx, **more)


def lines(found: Evidence) -> list[tuple[str, str]]:
    return [(finding.level, finding.found) for finding in check_transport(found)]


def test_nothing_is_said_where_ucx_is_not_wanted() -> None:
    assert lines(two_nodes(WorkerUcx.OFF)) == []
    assert lines(two_nodes(WorkerUcx.AUTO, gpus=False, without=MISSING)) == []
    assert lines(replace(two_nodes(WorkerUcx.AUTO), plan=None)) == []


def test_ucx_that_works() -> None:
    tests = {0: Outcome(ucx=UcxResult()), 1: Outcome(ucx=UcxResult())}
    ((level, text),) = lines(two_nodes(WorkerUcx.AUTO, tests=tests))
    assert level == "ok"
    assert "UCX for GPU memory between workers" in text
    assert "UCX works within 2 nodes and from each to the next" in text


def test_ucx_that_does_not_work_on_one_node() -> None:
    tests = {0: Outcome(ucx=UcxResult()), 1: Outcome(ucx=UcxResult("no device"))}
    (finding,) = check_transport(two_nodes(WorkerUcx.AUTO, tests=tests))
    assert (finding.level, finding.ranks) == ("warning", (1,))
    assert "no device" in finding.found


def test_ucx_that_does_not_work_between_nodes() -> None:
    tests = {0: Outcome(ucx=UcxResult(between=(("h2", "nothing came"),))), 1: Outcome(ucx=UcxResult())}
    (finding,) = check_transport(two_nodes(WorkerUcx.AUTO, tests=tests))
    assert (finding.level, finding.ranks) == ("warning", (0,))
    assert "UCX does not work to h2: nothing came" in finding.found
    assert "ports" in finding.fix


@pytest.mark.parametrize(("ucx", "level"), [(WorkerUcx.AUTO, "warning"), (WorkerUcx.ALL, "error")])
def test_a_package_that_is_missing(ucx: WorkerUcx, level: str) -> None:
    (finding,) = check_transport(two_nodes(ucx, without=MISSING))
    assert isinstance(finding, Finding)
    assert finding.level == level
    assert "distributed-ucxx is not installed" in finding.found
    assert finding.fix == "pip install it"


def test_one_rank_of_each_node_tries() -> None:
    assert _tries_of_ucx(two_nodes(WorkerUcx.OFF)) == ({}, False)
    found = two_nodes(WorkerUcx.AUTO)
    devices = {worker.rank: worker.device for worker in found.plan.workers}  # type: ignore[union-attr]
    assert _tries_of_ucx(found) == (devices, True)
    assert _tries_of_ucx(two_nodes(WorkerUcx.AUTO, without=MISSING)) == ({}, False)  # nobody will use it
    assert _tries_of_ucx(two_nodes(WorkerUcx.ALL, gpus=False)) == ({0: "", 1: ""}, True)
    assert _tries_of_ucx(two_nodes(WorkerUcx.AUTO, gpus=False)) == ({}, False)
