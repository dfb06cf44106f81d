"""One job for each place of an intruder: what came of all attacks on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.bed.hosts import TestBed
from support.intruders.jobs import (
    ATTACKS,
    HOLD_MEETING,
    IN_MEETING,
    OWN_MPI,
    Attacked,
    attack_meeting,
    attacked,
    start,
)
from support.jobs.clusters import network_of
from support.jobs.mpi import Mpi

#: Another user, whom every system has.
USER = "nobody"


@pytest.fixture(scope="session")
def jobs(detected_mpi: Mpi) -> Iterator[Mpi]:
    """Starts the jobs that several tests look at. They have no right to change networks, which only root's jobs have."""
    prefix = () if os.geteuid() else ("setpriv", "--bounding-set", "-net_admin")
    mpi = replace(detected_mpi, jobs=[], prefix=prefix)
    yield mpi
    mpi.close()


@pytest.fixture(scope="session")
def from_another_host(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Two ranks on two hosts; the intruder is another user on a third host."""
    return on_hosts(jobs, hosts, 2, hosts.hosts[2], ATTACKS)


@pytest.fixture(scope="session")
def from_another_user(jobs: Mpi) -> Attacked:
    """Two ranks on one host; the intruder is another user there."""
    return on_one_host(jobs, {kind: ATTACKS[kind] for kind in ("comm", "http", "mpi", "launcher")})


@pytest.fixture(scope="session")
def on_three_hosts(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Three ranks on three hosts; the intruder is another user on the first of them, who tries the launcher's ports."""
    return on_hosts(jobs, hosts, 3, hosts.hosts[0], {"launcher": ATTACKS["launcher"]})


@pytest.fixture(scope="session")
def with_mpi_of_the_script(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Two ranks on two hosts, whose script is an MPI process; the intruder is another user on the first of them."""
    attacks = {"mpi": IN_MEETING, "launcher": ATTACKS["launcher"]}
    return on_hosts(jobs, hosts, 2, hosts.hosts[0], attacks, OWN_MPI)


@pytest.fixture(scope="session")
def in_the_meeting(jobs: Mpi, hosts: TestBed) -> Mapping[str, Attacked]:
    """Two ranks on two hosts, held in the meeting: what comes of another user on a third host, and then on the first."""
    job = start(jobs, 2, bed=hosts, hosts=hosts.hosts[:2], chosen=HOLD_MEETING)
    places = {"another host": hosts.on(hosts.hosts[2], []), "a host of the job": hosts.on(hosts.hosts[0], [])}
    return attack_meeting(job, 2, places, networks_of(hosts, 2), USER)


@pytest.fixture(scope="session")
def without_encryption(jobs: Mpi) -> Attacked:
    """The same without TLS, where intruders do get in."""
    ways = ("plain TCP", "a process of Dask", "replayed", "pickle and msgpack bombs")
    return on_one_host(jobs, {"comm": (ways,)}, security=False)


def on_hosts(
    mpi: Mpi,
    bed: TestBed,
    count: int,
    intruder: str,
    attacks: Mapping[str, Sequence[Sequence[str]]],
    chosen: Mapping[str, str] | None = None,
) -> Attacked:
    """Attack a job on the first hosts from another one, or from one of them."""
    job = start(mpi, count, bed=bed, hosts=bed.hosts[:count], chosen=chosen)
    return attacked(job, bed.on(intruder, []), networks_of(bed, count), USER, attacks)


def on_one_host(mpi: Mpi, attacks: Mapping[str, Sequence[Sequence[str]]], **options: Any) -> Attacked:
    """Attack a job on this host."""
    if os.geteuid():
        pytest.skip("needs root, who may become another user")
    networks = {os.readlink("/proc/self/ns/net"): "127.0.0.1"}
    return attacked(start(mpi, 2, options=options), [], networks, USER, attacks)


def networks_of(bed: TestBed, count: int) -> dict[str, str]:
    """Address of each of the first hosts, by its network."""
    hosts = enumerate(bed.hosts[:count], 1)
    return {network_of(bed.holder(host)): f"10.77.0.{number}" for number, host in hosts}
