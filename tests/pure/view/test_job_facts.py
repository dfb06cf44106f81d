"""What the scheduler is told of its job."""

from __future__ import annotations

import json
from dataclasses import replace

from dask_gpu_mpi.base.plain_data import from_plain, pack, unpack
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.view.job_facts import JobFacts, PlannedRow, facts_of
from support.mocks.inputs import gpu, plan, rank


def planned(**options: object) -> Plan:
    return plan([rank(0, 1, (gpu(0), gpu(1)))], **options)


def test_a_row_for_each_gpu_and_each_worker_without_one() -> None:
    made = planned(cpu_workers=1)
    facts = facts_of(made)
    host = made.hosts[0].host
    devices = [each.uuid for each in made.hosts[0].gpus]
    assert facts.rows == (
        PlannedRow("0-0", host, "gpu", 0, devices[0]),
        PlannedRow("0-1", host, "gpu", 1, devices[1]),
        PlannedRow("0-cpu-0", host, "cpu"),
    )
    assert facts.warnings == tuple(map(str, made.warnings))


def test_a_worker_of_several_gpus_has_a_row_for_each() -> None:
    rows = facts_of(planned(gpus_per_worker=2)).rows
    assert [(row.worker, row.gpu_index) for row in rows] == [("0-0", 0), ("0-0", 1)]
    assert len({row.device for row in rows}) == 2


def test_it_goes_to_other_ranks_and_to_those_who_ask() -> None:
    facts = replace(facts_of(planned(cpu_workers=1)), warnings=("ä",))
    assert from_plain(JobFacts, unpack(pack(facts))) == facts
    assert JobFacts.from_data(json.loads(json.dumps(facts.as_data()))) == facts
