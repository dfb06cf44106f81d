"""What tests of jobs on emulated GPUs share: a script that looks at its workers from inside, and what must be true."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.jobs.clusters import workers_of
from support.jobs.scripts import script
from support.mocks.gpus import Described, SimGpu, SimMig, emulated_environ

#: The cores that this process, and so every rank of a job that binds nothing, may use.
CORES = sorted(os.sched_getaffinity(0))
#: Two sockets, where this machine has cores for them.
SOCKETS = [tuple(CORES[: (len(CORES) + 1) // 2]), tuple(CORES[len(CORES) // 2 :])]

#: A folder with emulated libraries, for PYTHONPATH.
SITE = Path(__file__).parents[1] / "mocks" / "site"

#: Runs as a command's script, or after `initialize`. Tasks are steered to GPU and CPU workers, where there are any.
SCRIPT = script("support/jobs/scripts/gpus.py")


def gpu_environ(gpus: Described) -> dict[str, str | None]:
    """What makes a job see these GPUs, and no others."""
    return {"CUDA_VISIBLE_DEVICES": None, **emulated_environ(gpus, {})}


def check_workers(
    told: Mapping[str, Any],
    gpus: Sequence[SimGpu],
    expected: Mapping[str, Sequence[SimGpu | SimMig]],
    *,
    bound: Mapping[int, set[int]] | None = None,
    cpu_workers: Sequence[str] = (),
    device_limit: float = 0.8,
) -> dict[str, dict[str, Any]]:
    """Compare every worker, as it is seen from inside, with what this job must give.

    `told`: the script's facts.
    `gpus`: all GPUs of all hosts.
    `expected`: the devices of each GPU worker, by its name.
    `bound`: the cores of each rank; default: all.
    `cpu_workers`: the names of all other workers.
    `device_limit`: part of the (first) device that the worker may fill.
    """
    rows = workers_of(dict(told))
    assert sorted(rows) == sorted([*expected, *cpu_workers])
    parents = {piece.uuid: gpu for gpu in gpus for piece in (gpu, *gpu.mig)}
    memory = {host["host"]: host["memory"] for host in told["plan"]["hosts"]}
    planned = {str(worker["name"]): worker for worker in told["plan"]["workers"]}
    assert sorted(planned) == sorted(rows)
    with_gpus = {host["host"]: bool(host["gpus"]) for host in told["plan"]["hosts"]}
    on_host = [row["host"] for row in rows.values()]
    for name, row in rows.items():
        line = planned[name]
        assert row["identity"] == []
        assert row["host"] == line["host"]
        assert row["nthreads"] == line["nthreads"]
        assert row["memory"] == line["memory_limit"]
        assert row["resources"] == line["resources"]
        assert row["memory"] == memory[row["host"]] // on_host.count(row["host"]) > 0
        nodes = {parents[device.uuid].node or 0 for device in expected.get(name, ())}
        assert line["numa"] == (nodes.pop() if len(nodes) == 1 else None)
        there = Path(f"/sys/devices/system/node/node{line['numa']}").exists()
        assert row["policy"] in (None, f"prefer:{line['numa']}" if there else "default")
        if name in cpu_workers:
            assert row["visible"] == "" or not with_gpus[row["host"]]
            assert row["device"] is None
            assert row["resources"] == {"CPU": row["nthreads"]}
            continue
        devices = expected[name]
        assert row["visible"] == ",".join(device.uuid for device in devices) == line["device"]
        assert row["resources"] == {"GPU": len(devices)}
        assert row["class"] == "Worker"
        assert row["nanny"]
        size = devices[0].memory
        assert size is not None
        assert row["device"] == int(device_limit * size)
        allowed = bound[int(name.split("-")[0])] if bound is not None else set(CORES)
        near = {core for device in devices for core in parents[device.uuid].cores or CORES}
        assert set(row["affinity"]) == (near & allowed or allowed) == set(line["cpus"])
    assert len({row["pid"] for row in rows.values()}) == len(rows)
    assert len({row["seed"] for row in rows.values()}) == 1
    steered = told.get("steered", {})
    assert set(steered.get("GPU", ())) <= set(expected)
    assert set(steered.get("CPU", ())) <= set(cpu_workers)
    assert set(steered) == {key for key, names in (("GPU", expected), ("CPU", cpu_workers)) if names}
    return rows
