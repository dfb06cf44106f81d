"""`check` over several hosts: a host that does not reach the scheduler, whatever MPI can do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from support.bed.hosts import TestBed
from support.jobs.clusters import COMMAND
from support.jobs.mpi import Mpi

#: Outside of the range from which MPI draws its own ports.
PORT = "1786"
CHECK = [*COMMAND, "check", "--json", "--scheduler-port", PORT]


def test_all_hosts_reach_the_scheduler(mpirun: Mpi, hosts: TestBed) -> None:
    data = json.loads(mpirun.run(CHECK, 3, bed=hosts).check().stdout)
    assert [(host["host"], host["ranks"]) for host in data["hosts"]] == [
        ("h1", [0]),
        ("h2", [1]),
        ("h3", [2]),
    ]
    assert data["scheduler"] == {"rank": 0, "host": "h1", "address": "10.77.0.1"}
    assert all(abs(host["clock_ahead"]) < 1 for host in data["hosts"]), data["hosts"]
    sent = [(one["from"], one["to"], one["between_nodes"], one["error"]) for one in data["transfers"]]
    assert sent == [(0, 1, True, None), (1, 2, True, None), (2, 0, True, None)]


#: Of workers; in a job whose nodes h2 and h3, which have no scheduler, do not reach each other there, whatever MPI can do.
WORKER_PORT = "1787"
OPTIONS = ["--worker-options", f'{{"worker_port": {WORKER_PORT}}}']


@contextlib.contextmanager
def apart(hosts: TestBed, port: str, *pairs: tuple[int, int]) -> Iterator[None]:
    """What these hosts send to this port of others does not arrive; all else does."""
    rules = [
        (f"h{here}", ["to", f"10.77.0.{there}", "ipproto", "tcp", "dport", port, "unreachable"])
        for here, there in pairs
    ]
    for host, rule in rules:
        hosts.ip(host, "rule", "add", *rule)
    try:
        yield
    finally:
        for host, rule in rules:
            hosts.ip(host, "rule", "del", *rule)


def test_host_that_does_not_reach_the_scheduler(mpirun: Mpi, hosts: TestBed) -> None:
    with apart(hosts, PORT, (3, 1)):
        done = mpirun.run(CHECK, 3, bed=hosts)
    found = [found for found in json.loads(done.check(1).stdout)["findings"] if found["level"] == "error"]
    assert [(one["what"], one["ranks"], one["hosts"]) for one in found] == [("network", [2], ["h3"])]
    assert f"at 10.77.0.1:{PORT} (rank 0 on h1)" in found[0]["found"]
    assert "--interface" in found[0]["remedy"]


def test_hosts_that_do_not_reach_each_other(mpirun: Mpi, hosts: TestBed) -> None:
    with apart(hosts, WORKER_PORT, (2, 3), (3, 2)):
        done = mpirun.run([*CHECK, *OPTIONS], 3, bed=hosts)
    found = [found for found in json.loads(done.check(1).stdout)["findings"] if found["level"] == "error"]
    assert [one["what"] for one in found] == ["node pairs"]
    assert "from h2 to h3 (" in found[0]["found"]
    assert "from h3 to h2 (" in found[0]["found"]


def test_a_job_over_hosts_that_do_not_reach_each_other(mpirun: Mpi, hosts: TestBed) -> None:
    """A shuffle would wait for them: the job does not start."""
    with apart(hosts, WORKER_PORT, (2, 3), (3, 2)):
        done = mpirun.run("print('the script runs')", 3, command=OPTIONS, bed=hosts)
    done.refused("no connection between nodes: from h2 to h3 (", "from h3 to h2 (")
    assert "the script runs" not in done.stdout
