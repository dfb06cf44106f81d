"""The main job over several hosts with GPUs of their own: the test bed, and emulated GPUs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import COMMAND, facts, listening, scratch_of, until, without_mpi, workers_of
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import (
    GIB,
    SimGpu,
    SimHost,
    SimMig,
    emulated_environ,
    make_gpus,
)

SCRIPT = script("hosts/scripts/tells_workers.py")


@pytest.fixture(scope="module")
def bed() -> Iterator[TestBed]:
    """Four hosts of this module's own, h1 to h4."""
    with TestBed.for_tests(4) as made:
        yield made


def environ(libdir: Path, gpus: Any) -> dict[str, str | None]:
    # Open MPI brings no more of the environment to other hosts than it is told
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH")}
    return {"CUDA_VISIBLE_DEVICES": None, **path, **emulated_environ(libdir, gpus, {})}


def check_workers(told: dict[str, Any], gpus: dict[str, tuple[SimGpu, ...]]) -> dict[str, dict[str, Any]]:
    """Every GPU worker is on the host of its GPU and sees that one alone; returns the looks by name."""
    rows, plan = workers_of(told), told["plan"]
    assert told["doubled"] == [2 * x for x in range(32)]
    assert sorted(rows) == sorted(worker["name"] for worker in plan["workers"])
    memory: dict[str, int] = {}
    for worker in plan["workers"]:
        row = rows[worker["name"]]
        device = {device.uuid: device for gpu in gpus[row["host"]] for device in (gpu, *gpu.mig)}[
            row["visible"]
        ]
        assert (row["host"], row["visible"]) == (worker["host"], worker["device"])
        assert row["device"] == int(0.8 * device.memory)  # type: ignore[operator]
        assert row["resources"] == {"GPU": 1}
        assert row["identity"] == []
        assert not row["address"].startswith(("tls://127.", "tls://localhost"))
        memory[row["host"]] = memory.get(row["host"], 0) + row["memory"]
    limits = {host["host"]: host["memory"] for host in plan["hosts"]}
    assert all(used <= limits[host] for host, used in memory.items()), memory
    assert len({row["visible"] for row in rows.values()}) == len(rows)
    assert len({row["seed"] for row in rows.values()}) == 1
    assert len({row["address"].rpartition(":")[0] for row in rows.values()}) == len(memory)
    return rows


@pytest.mark.slow
def test_sixteen_workers_on_four_hosts(mpirun: Mpi, bed: TestBed, libdir: Path, tmp_path: Path) -> None:
    gpus = {host: make_gpus(4, host=host, memory=80 * GIB) for host in bed.hosts}
    env = environ(libdir, {host: SimHost(there) for host, there in gpus.items()})
    (tmp_path / "analysis.py").write_text(SCRIPT)
    line = [*COMMAND, str(tmp_path / "analysis.py"), str(tmp_path)]
    job = mpirun.start(line, 4, bed=bed, env=env)
    job.wait_for("FACTS", 60)
    told = facts(job)
    rows = check_workers(told, gpus)
    assert sorted(rows) == [f"{rank}-{gpu}" for rank in range(4) for gpu in range(4)]
    assert all(rows[f"{rank}-{gpu}"]["host"] == f"h{rank + 1}" for rank in range(4) for gpu in range(4))
    assert (told["rank"], told["host"]) == (0, "h1")
    # Dask listens on each host's own address, never on all of them; what browsers see, on the loopback interface alone.
    sockets = {pid: set(listening(pid)) for pid in without_mpi(job)}
    assert {address for found in sockets.values() for address, _ in found}.isdisjoint({"0.0.0.0", "::"})
    assert any(("127.0.0.1", urlsplit(told["dashboard"]).port) in found for found in sockets.values()), (
        sockets
    )
    outside = {socket for found in sockets.values() for socket in found if socket[0] != "127.0.0.1"}
    # the workers, their nannies, the scheduler
    assert len(outside) == 16 + 16 + 1
    (tmp_path / "go-on").touch()
    done = job.wait(30).check(7)
    assert done.stdout.count("the script runs") == 1
    assert done.stderr.count("16 workers on 4 hosts, 16 GPUs, ready after") == 1
    assert scratch_of(job) == []


@pytest.mark.both_mpis
@pytest.mark.quick
def test_hosts_that_differ(mpirun: Mpi, bed: TestBed, libdir: Path, tmp_path: Path) -> None:
    # the client's host has no driver at all, one host has slices, one a GPU of another kind
    small = SimGpu(uuid="GPU-aaaaaaaa-0000-4000-8000-000000000001", name="NVIDIA T4", memory=16 * GIB)
    slices = tuple(SimMig(f"MIG-bbbbbbbb-0000-4000-8000-00000000000{i}", 10 * GIB) for i in range(2))
    sliced = SimGpu(uuid="GPU-cccccccc-0000-4000-8000-000000000001", memory=40 * GIB, mig=slices)
    gpus = {"h1": make_gpus(2, host="h1", memory=80 * GIB), "h3": (small,), "h4": (sliced,)}
    env = environ(libdir, {host: SimHost(there) for host, there in gpus.items()})
    (tmp_path / "analysis.py").write_text(SCRIPT)
    (tmp_path / "go-on").touch()
    line = [*COMMAND, "--client-rank", "1", str(tmp_path / "analysis.py"), str(tmp_path)]
    done = mpirun.run(line, 4, bed=bed, env=env).check(7)
    told = facts(done)
    rows = check_workers(told, gpus)
    assert (told["rank"], told["host"]) == (1, "h2")
    assert sorted(rows) == ["0-0", "0-1", "2-0", "3-0", "3-1"]
    assert {rows["3-0"]["visible"], rows["3-1"]["visible"]} == {piece.uuid for piece in slices}
    assert len(told["plan"]["warnings"]) == 1
    assert "rank 1" in told["plan"]["warnings"][0]
    assert told["plan"]["warnings"][0] in done.stderr
    assert (
        "was not matched" not in done.output
    )  # UCX's word, at the end of MPICH, about messages that nobody received
    until(lambda: not scratch_of(mpirun.jobs[-1]), 5)
