"""Jobs over several hosts, most of which differ, with real processes, and every worker looked at from inside."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import facts, listening, scratch_of, until, without_mpi
from support.jobs.gpus import SCRIPT, check_workers
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, ONLY_VARIABLE, SimGpu, SimHost, SimMig, make_gpus

GPUS = {"h1": make_gpus(4, host="h1", memory=80 * GIB), "h2": make_gpus(3, host="h2", memory=40 * GIB)}
ALL = [gpu for gpus in GPUS.values() for gpu in gpus]


HOSTS = {host: SimHost(gpus) for host, gpus in GPUS.items()}


def test_a_rank_per_gpu_behind_cgroups_on_hosts_of_different_size(mpirun: Mpi, hosts: TestBed) -> None:
    only = [{ONLY_VARIABLE: place, "CUDA_VISIBLE_DEVICES": "0"} for place in ("3", "0", "1", "2")]
    where: dict[str, Any] = {"bed": hosts, "hosts": {"h1": 3, "h2": 1}, "gpus": HOSTS, "per_rank_env": only}
    told = facts(mpirun.run(SCRIPT, 4, command=[], **where).check())
    one, two = GPUS["h1"], GPUS["h2"]
    rows = check_workers(told, ALL, {"0-2": [one[3]], "1-0": [one[0]], "2-1": [one[1]], "3-0": [two[2]]})
    assert [rows[name]["host"] for name in ("0-2", "1-0", "2-1", "3-0")] == ["h1", "h1", "h1", "h2"]


def test_gpu_and_cpu_workers_on_gpu_and_cpu_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    # two GPUs for each worker, other parts visible on each host; the third host has no driver
    visible = [
        {"CUDA_VISIBLE_DEVICES": "3,1,0,2"},
        {"CUDA_VISIBLE_DEVICES": f"2,{GPUS['h2'][0].uuid}"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ]
    options = ["--gpus-per-worker", "2", "--cpu-workers", "1"]
    told = facts(mpirun.run(SCRIPT, 3, command=options, bed=hosts, gpus=HOSTS, per_rank_env=visible).check())
    one, two = GPUS["h1"], GPUS["h2"]
    expected = {"0-0": one[:2], "0-2": one[2:], "1-0": [two[0], two[2]]}
    rows = check_workers(told, ALL, expected, cpu_workers=["0-cpu-0", "1-cpu-0", "2-cpu-0"])
    assert {name: row["host"] for name, row in rows.items()} == {
        "0-0": "h1", "0-2": "h1", "0-cpu-0": "h1", "1-0": "h2", "1-cpu-0": "h2", "2-cpu-0": "h3",
    }  # fmt: skip
    (warning,) = told["plan"]["warnings"]
    assert "more ranks than GPUs: rank 2 on h3" in warning


@pytest.mark.both_mpis
@pytest.mark.quick
def test_hosts_that_differ(mpirun: Mpi, hosts: TestBed) -> None:
    # the client's host has no driver at all, one host has slices, and a GPU of another kind
    small = SimGpu(uuid="GPU-aaaaaaaa-0000-4000-8000-000000000001", name="NVIDIA T4", memory=16 * GIB)
    slices = [SimMig(f"MIG-bbbbbbbb-0000-4000-8000-00000000000{i}", 10 * GIB) for i in range(2)]
    sliced = SimGpu(uuid="GPU-cccccccc-0000-4000-8000-000000000001", memory=40 * GIB, mig=tuple(slices))
    large = make_gpus(2, host="h1", memory=80 * GIB)
    gpus = {"h1": SimHost(large), "h3": SimHost((small, sliced))}
    done = mpirun.run(SCRIPT, 3, command=["--client-rank", "1"], bed=hosts, gpus=gpus).check()
    told = facts(done)
    names = {"0-0": large[:1], "0-1": large[1:], "2-0": [small], "2-1": slices[:1], "2-2": slices[1:]}
    check_workers(told, [*large, small, sliced], names)
    (warning,) = told["plan"]["warnings"]
    assert "rank 1" in warning
    assert warning in done.stderr
    # UCX's word, at the end of MPICH, about messages that nobody received
    assert "was not matched" not in done.output
    until(lambda: not scratch_of(mpirun.jobs[-1]), 5)


@pytest.mark.slow
def test_twelve_workers_on_three_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    gpus = {host: make_gpus(4, host=host, memory=80 * GIB) for host in hosts.hosts}
    there = {host: SimHost(found) for host, found in gpus.items()}
    waits = "tell(dashboard=current_session().dashboard_link)\ngo_on()\n"
    job = mpirun.start(SCRIPT + waits, 3, command=[], bed=hosts, gpus=there)
    job.wait_for("dashboard")
    told = facts(job)
    names = {
        f"{rank}-{place}": [gpu]
        for rank, found in enumerate(gpus.values())
        for place, gpu in enumerate(found)
    }
    rows = check_workers(told, [gpu for each in gpus.values() for gpu in each], names)
    assert len({row["address"].rpartition(":")[0] for row in rows.values()}) == 3
    # Dask listens on each host's own address, never on all of them; what browsers see, on the loopback interface alone.
    sockets = {socket for pid in without_mpi(job) for socket in listening(pid)}
    assert {address for address, _ in sockets}.isdisjoint({"0.0.0.0", "::"})
    assert ("127.0.0.1", urlsplit(told["dashboard"]).port) in sockets
    # the workers, their nannies, the scheduler, the hub
    assert sum(address != "127.0.0.1" for address, _ in sockets) == 12 + 12 + 1 + 1
    done = job.go_on()
    assert done.stderr.count("12 workers on 3 hosts, 12 GPUs, ready after") == 1
    assert scratch_of(job) == []
