"""One job for each place of an intruder: what came of all attacks on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.bed.hosts import TestBed
from support.intruders.jobs import ATTACKS, Attacked, attacked, start
from support.jobs.mpi import Mpi

#: Another user, whom every system has.
USER = "nobody"
#: A user's variables with which ranks of one host listen on loopback. (UCX 1.20 does not reach itself there: posix)
WITH_PORTS = {
    "openmpi": {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"},
    "mpich": {"UCX_TLS": "tcp,self,posix", "UCX_NET_DEVICES": "lo"},
}


@pytest.fixture(scope="session")
def jobs(detected_mpi: Mpi) -> Iterator[Mpi]:
    """Starts the jobs that several tests look at."""
    mpi = replace(detected_mpi, jobs=[])
    yield mpi
    mpi.close()


@pytest.fixture(scope="session")
def from_another_host(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Two ranks on two hosts; the intruder is another user on a third host."""
    return on_two_hosts(jobs, hosts, hosts.hosts[2], ATTACKS)


@pytest.fixture(scope="session")
def from_a_host_of_the_job(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Two ranks on two hosts; the intruder is another user on the first of them, and tries what only MPI is open to."""
    return on_two_hosts(jobs, hosts, hosts.hosts[0], {"mpi": (("a rank's handshake",),)})


@pytest.fixture(scope="session")
def from_another_user(jobs: Mpi) -> Attacked:
    """Two ranks on one host; the intruder is another user there."""
    return on_one_host(jobs, {kind: ATTACKS[kind] for kind in ("comm", "http", "mpi")})


@pytest.fixture(scope="session")
def with_ports_of_mpi(jobs: Mpi) -> Attacked:
    """The same with a port of MPI in each rank, which the user has asked for."""
    attacks = {"mpi": (("memory by UCX",), ("a rank's handshake",))}
    return on_one_host(jobs, attacks, chosen=WITH_PORTS[jobs.name])


@pytest.fixture(scope="session")
def without_encryption(jobs: Mpi) -> Attacked:
    """The same without TLS, where intruders do get in."""
    ways = ("plain TCP", "a process of Dask", "replayed", "pickle and msgpack bombs")
    return on_one_host(jobs, {"comm": (ways,)}, security=False)


def on_two_hosts(
    mpi: Mpi, bed: TestBed, intruder: str, attacks: Mapping[str, Sequence[Sequence[str]]]
) -> Attacked:
    """Attack a job on the first two hosts from a third one, or from one of them."""
    job = start(mpi, 2, bed=bed, hosts=bed.hosts[:2])
    networks = {network(bed, host): f"10.77.0.{number}" for number, host in enumerate(bed.hosts[:2], 1)}
    return attacked(job, bed.on(intruder, []), networks, USER, attacks)


def on_one_host(
    mpi: Mpi,
    attacks: Mapping[str, Sequence[Sequence[str]]],
    *,
    chosen: Mapping[str, str] | None = None,
    **options: Any,
) -> Attacked:
    """Attack a job on this host; `chosen` are its user's variables."""
    if os.geteuid():
        pytest.skip("needs root, who may become another user")
    networks = {os.readlink("/proc/self/ns/net"): "127.0.0.1"}
    return attacked(start(mpi, 2, options=options, chosen=chosen), [], networks, USER, attacks)


def network(bed: TestBed, host: str) -> str:
    """A host's network, as `listeners.Place` names it."""
    pid = (bed.state / f"{host}.holder").read_text().split()[0]
    return os.readlink(Path("/proc") / pid / "ns" / "net")
