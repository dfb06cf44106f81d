"""One job for each place of an intruder: what came of all attacks on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import Mpi, TestBed
from intruderjobs import Attacked, attacked, start

#: Another user, whom every system has.
USER = "nobody"


@pytest.fixture(scope="session")
def jobs(detected_mpi: Mpi) -> Iterator[Mpi]:
    """Starts the jobs that several tests look at."""
    mpi = replace(detected_mpi, jobs=[])
    yield mpi
    mpi.close()


@pytest.fixture(scope="session")
def from_another_host(jobs: Mpi, hosts: TestBed) -> Attacked:
    """Two ranks on two hosts; the intruder is another user on a third host."""
    job = start(jobs, 2, bed=hosts, hosts=hosts.hosts[:2])
    networks = {network(hosts, host): f"10.77.0.{number}" for number, host in enumerate(hosts.hosts[:2], 1)}
    return attacked(job, hosts.on(hosts.hosts[2], []), networks, USER, ("start", "comm", "http", "mpi"))


@pytest.fixture(scope="session")
def from_another_user(jobs: Mpi) -> Attacked:
    """Two ranks on one host; the intruder is another user there."""
    if os.geteuid():
        pytest.skip("needs root, who may become another user")
    networks = {os.readlink("/proc/self/ns/net"): "127.0.0.1"}
    return attacked(start(jobs, 2), [], networks, USER, ("comm", "http"))


def network(bed: TestBed, host: str) -> str:
    """A host's network, as `listeners.Place` names it."""
    pid = (bed.state / f"{host}.holder").read_text().split()[0]
    return os.readlink(Path("/proc") / pid / "ns" / "net")
