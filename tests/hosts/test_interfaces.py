"""Which network a cluster takes, and what it says when that leads nowhere."""

from __future__ import annotations

import subprocess

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import LOOKS, facts
from support.jobs.mpi import CompletedJob, Mpi

#: Open MPI itself is to use the network that works.
MPI_NETWORK = {"OMPI_MCA_btl_tcp_if_include": "eth0", "PRTE_MCA_prte_if_include": "eth0"}


def add_interface(bed: TestBed, number: int, name: str, address: str, *, leads: bool) -> None:
    """One more network on host `number`: on the switch, if it leads anywhere."""
    host = bed.hosts[number - 1]
    bed.ip(host, "link", "add", name, "type", "veth", "peer", "name", f"{name}far")
    if leads:
        switch = str(bed.holder("switch"))
        bed.ip(host, "link", "set", f"{name}far", "netns", switch, "name", f"{name}{number}")
        inside = f"nsenter -t {switch} -n ip link set {name}{number} master br0 up"
        subprocess.run(inside.split(), check=True, timeout=10)
    else:
        bed.ip(host, "link", "set", f"{name}far", "up")
    bed.ip(host, "addr", "add", address, "dev", name)
    bed.ip(host, "link", "set", name, "up")


def addresses(done: CompletedJob) -> list[str]:
    """Where the workers are, without ports."""
    return sorted(row["address"].rpartition(":")[0] for row in facts(done)["workers"])


def test_the_fast_network_that_leads_everywhere(mpirun: Mpi, bed: TestBed) -> None:
    """`auto`: two hosts have ib0, all have hsn0, and eth0 with the default route."""
    for number, host in enumerate(bed.hosts, 1):
        add_interface(bed, number, "hsn0", f"10.98.0.{number}/24", leads=True)
        bed.ip(host, "route", "add", "default", "dev", "eth0")
    for number in (1, 2):
        add_interface(bed, number, "ib0", f"10.99.0.{number}/24", leads=False)
    done = mpirun.run(LOOKS, 3, command=["--interface", "auto"], bed=bed, env=MPI_NETWORK).check()
    assert addresses(done) == [f"tls://10.98.0.{number}" for number in (1, 2, 3)]


def test_a_network_that_leads_nowhere(mpirun: Mpi, bed: TestBed) -> None:
    """All have an ib0 on the same network, but nothing arrives: each rank that finds out is named, before any worker starts."""
    for number in (1, 2, 3):
        add_interface(bed, number, "ib0", f"10.99.0.{number}/24", leads=False)
    done = mpirun.run(LOOKS, 3, command=[], bed=bed, env=MPI_NETWORK)
    done.refused("ranks 1-2 of 3 on h2, h3: could not reach rank 0 at 10.99.0.1:", "--interface")


@pytest.mark.of_mpi("openmpi")  # the daemons of Hydra (MPICH 5.0.2) connect to mpirun by IPv4
def test_nodes_with_ipv6_only(mpirun: Mpi, bed: TestBed) -> None:
    """Launcher, MPI, reachability, scheduler, workers: the nodes have no IPv4 address but that of loopback."""
    names = [f"fd77::{number} {host}\n" for number, host in enumerate(bed.hosts, 1)]
    (bed.state / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
    for number, host in enumerate(bed.hosts, 1):
        bed.ip(host, "-4", "addr", "flush", "dev", "eth0")
        bed.ip(host, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
    done = mpirun.run(LOOKS, 3, command=[], bed=bed, env=MPI_NETWORK).check()
    assert addresses(done) == [f"tls://[fd77::{number}]" for number in (1, 2, 3)]
