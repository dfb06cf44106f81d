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
#: Whatever else h3 sends to h1 arrives.
RULE = ["to", "10.77.0.1", "ipproto", "tcp", "dport", PORT, "unreachable"]


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


def test_host_that_does_not_reach_the_scheduler(mpirun: Mpi, hosts: TestBed) -> None:
    hosts.ip("h3", "rule", "add", *RULE)
    try:
        done = mpirun.run(CHECK, 3, bed=hosts)
    finally:
        hosts.ip("h3", "rule", "del", *RULE)
    found = [found for found in json.loads(done.check(1).stdout)["findings"] if found["level"] == "error"]
    assert [(one["what"], one["ranks"], one["hosts"]) for one in found] == [("network", [2], ["h3"])]
    assert f"at 10.77.0.1:{PORT} (rank 0 on h1)" in found[0]["found"]
    assert "--interface" in found[0]["remedy"]


#: Of workers; in a job whose nodes h2 and h3, which have no scheduler, do not reach each other there, whatever MPI can do.
WORKER_PORT = "1787"
OPTIONS = ["--worker-options", f'{{"worker_port": {WORKER_PORT}}}']


@contextlib.contextmanager
def apart(hosts: TestBed, one: int, other: int) -> Iterator[None]:
    """Workers of these two hosts do not reach each other."""
    rules = []
    for here, there in ((one, other), (other, one)):
        rule = ["to", f"10.77.0.{there}", "ipproto", "tcp", "dport", WORKER_PORT, "unreachable"]
        rules.append((hosts.hosts[here - 1], rule))
        hosts.ip(rules[-1][0], "rule", "add", *rule)
    try:
        yield
    finally:
        for host, rule in rules:
            hosts.ip(host, "rule", "del", *rule)


def test_hosts_that_do_not_reach_each_other(mpirun: Mpi, hosts: TestBed) -> None:
    with apart(hosts, 2, 3):
        done = mpirun.run([*CHECK, *OPTIONS], 3, bed=hosts)
    found = [found for found in json.loads(done.check(1).stdout)["findings"] if found["level"] == "error"]
    assert [one["what"] for one in found] == ["node pairs"]
    assert "from h2 to h3 (" in found[0]["found"]
    assert "from h3 to h2 (" in found[0]["found"]


def test_a_job_over_hosts_that_do_not_reach_each_other(mpirun: Mpi, hosts: TestBed) -> None:
    """A shuffle would wait for them: the job does not start."""
    with apart(hosts, 2, 3):
        done = mpirun.run("print('the script runs')", 3, command=OPTIONS, bed=hosts)
    assert done.rc == 2, done.stderr
    assert "no connection between nodes: from h2 to h3 (" in done.refusal
    assert "from h3 to h2 (" in done.refusal
    assert "the script runs" not in done.stdout
