"""A gang of sixteen workers on three hosts: its ranks, its network, and a member that is killed on another host."""

from __future__ import annotations

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import GIB, SimHost, make_gpus

SCRIPT = script("hosts/scripts/gangs.py")


@pytest.mark.slow
def test_sixteen_members_on_three_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    count = {"h1": 6, "h2": 5, "h3": 5}
    gpus = {host: SimHost(make_gpus(number, host=host, memory=80 * GIB)) for host, number in count.items()}
    told = facts(mpirun.run(SCRIPT, 3, command=[], bed=hosts, gpus=gpus).check(7))
    names = [host for host, number in count.items() for _ in range(number)]
    for found in (told["first"], told["second"]):
        assert [row["rank"] for row in found] == list(range(16))
        assert [row["host"] for row in found] == names
        assert all(row["hosts"] == names and row["gathered"] == list(range(16)) for row in found), found
        assert [row["local"] for row in found] == [*range(6), *range(5), *range(5)]
        assert {(row["host"], row["node"], row["local_size"]) for row in found} == {
            ("h1", 0, 6),
            ("h2", 1, 5),
            ("h3", 2, 5),
        }
        assert {row["device"] for row in found} == {0}
        masters = {row["master"] for row in found}
        assert len(masters) == 1
        assert not masters.pop().startswith("127.")
        assert all(row["nccl"] == f"={row['interface']}" != "=lo" for row in found), found
    rank, worker, host, text = told["error"]
    assert (rank, worker, host) == (15, "2-4", "h3")
    assert text == "spmd: rank 15 (worker 2-4 on h3) died while the gang ran"
    assert len(told["alive"]) == 16
