"""The plan as data."""

from __future__ import annotations

import json

from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support.mocks.inputs import GIB, plan


def test_json_has_the_schema_of_the_design() -> None:
    found = plan(hypothetical_job(2, 2, 2, memory_per_node=256 * GIB), cpu_workers=1)
    document = json.loads(json.dumps(found.as_json()))
    assert list(document) == ["layout", "world_size", "scheduler", "client", "hosts", "workers", "warnings"]
    assert document["client"] == {"rank": 0, "host": "h1"}
    assert document["scheduler"] == {"rank": 0, "host": "h1", "device": found.hosts[0].gpus[0].uuid}
    assert document["hosts"][1] == {
        "host": "h2",
        "ranks": [2, 3],
        "gpus": [
            {"index": g.index, "uuid": g.uuid, "name": g.name, "memory": g.memory}
            for g in found.hosts[1].gpus
        ],
        "memory": 256 * GIB,
    }
    assert document["workers"][0] == {
        "name": "0-0",
        "rank": 0,
        "host": "h1",
        "kind": "gpu",
        "gpu_index": 0,
        "device": found.hosts[0].gpus[0].uuid,
        "nthreads": 1,
        "memory_limit": 256 * GIB // 3,
        "cpus": list(range(32)),
        "resources": {"GPU": 1.0},
        "device_sizes": {"device_memory_limit": int(0.8 * found.hosts[0].gpus[0].memory)},
    }


def test_it_is_shown_in_one_short_line() -> None:
    found = plan(hypothetical_job(64, 1, 4))
    assert repr(found) == (
        "<Plan: 64 nodes, 256 GPUs, 256 workers, 64 ranks, layout shared; scheduler: rank 0 on h1; client: rank 0 on h1>"
    )
    assert repr(plan(hypothetical_job(1, 2, 1))).endswith("on h1; 1 warning>")
