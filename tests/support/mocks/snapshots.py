"""Jobs for the tests of `diagnostics`: as a scheduler reports them, and as a recorder has recorded them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from dask_gpu_mpi.base.plain_data import pack
from support import ROOT
from support.mocks.inputs import plan_of, worker_plan

GIB = 2**30


def metrics(use: int | None, *, received: int = 0, at: float = 1.0) -> dict[str, Any]:
    """What a worker sends; `use` None: it has no GPU."""
    monitored = {"gpu_utilization": use, "gpu_memory_used": 10 * GIB, "gpu-memory-total": 80 * GIB}
    return {
        "memory": 2 * GIB,
        "task_counts": {
            "executing": 1,
            "long-running": 1,
            "ready": 3,
            "waiting": 4,
            "memory": 99,
            "fetch": 5,
        },
        "spilled_bytes": {"memory": 12, "disk": 11},
        "rmm": {"rmm-used": GIB, "rmm-total": 40 * GIB},
        "gpu_mpi": {"time": at, "sent": 0, "received": received},
        **(monitored if use is not None else {}),
    }


def identity_of(workers: Mapping[Any, Mapping[str, Any]], *, port: int = 1) -> dict[str, Any]:
    """``Scheduler.identity()`` with these workers' metrics, by name."""
    described = {
        f"tls://10.0.0.1:{port}{number}": {
            "name": name,
            "host": "10.0.0.1",
            "memory_limit": 64 * GIB,
            "status": "running",
            "metrics": dict(told),
        }
        for number, (name, told) in enumerate(workers.items())
    }
    return {"type": "Scheduler", "address": "tls://10.0.0.1:8786", "workers": described}


def cluster(nodes: int, gpus: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The identity of a cluster's scheduler, and its answer of the job: each GPU is in use by its place, in percent."""
    names = [(node, place) for node in range(nodes) for place in range(gpus)]
    planned = [
        worker_plan(f"{node}-{place}", f"GPU-{node}-{place}", host=f"node{node:04d}", gpu_index=place)
        for node, place in names
    ]
    identity = identity_of(
        {f"{node}-{place}": metrics(use=(node * gpus + place) % 101) for node, place in names}
    )
    return identity, {"plan": pack(plan_of(*planned)), "events": [], "end": None, "now": 7.0}


def made_up(nodes: int, gpus: int, seconds: int, tasks: int) -> Any:
    """A job of the benchmark that makes jobs up."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("recording").made_up(nodes, gpus, seconds, tasks)
    finally:
        del sys.path[0]
