"""`check` over several hosts: a host that does not reach the scheduler, whatever MPI can do."""

from __future__ import annotations

import json
import os
import subprocess

from clusters import COMMAND
from harness import Mpi, TestBed

#: Outside of the range from which MPI draws its own ports.
PORT = "1786"
CHECK = [*COMMAND, "check", "--json", "--scheduler-port", PORT]
#: Whatever else h3 sends to h1 arrives.
RULE = ["to", "10.77.0.1", "ipproto", "tcp", "dport", PORT, "unreachable"]


def environ() -> dict[str, str | None]:
    # Open MPI brings no more of the environment to other hosts than it is told
    return {"PYTHONPATH": os.environ.get("PYTHONPATH")}


def test_all_hosts_reach_the_scheduler(mpirun: Mpi, hosts: TestBed) -> None:
    data = json.loads(mpirun.run(CHECK, 4, bed=hosts, env=environ()).check().stdout)
    assert [(host["host"], host["ranks"]) for host in data["hosts"]] == [
        ("h1", [0, 1]),
        ("h2", [2]),
        ("h3", [3]),
    ]
    assert data["scheduler"] == {"rank": 0, "host": "h1", "address": "10.77.0.1"}
    assert all(abs(host["clock_ahead"]) < 1 for host in data["hosts"])


def test_host_that_does_not_reach_the_scheduler(mpirun: Mpi, hosts: TestBed) -> None:
    subprocess.run(hosts.on("h3", ["ip", "rule", "add", *RULE]), check=True)
    try:
        done = mpirun.run(CHECK, 3, bed=hosts, env=environ())
    finally:
        subprocess.run(hosts.on("h3", ["ip", "rule", "del", *RULE]), check=True)
    found = [found for found in json.loads(done.check(1).stdout)["findings"] if found["level"] == "error"]
    assert [(one["what"], one["ranks"], one["hosts"]) for one in found] == [("network", [2], ["h3"])]
    assert f"rank 0 on h1 at 10.77.0.1:{PORT}" in found[0]["found"]
    assert "--interface" in found[0]["remedy"]
