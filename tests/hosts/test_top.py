"""`top` where its user is: on the login node, while the job runs on others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.bed.hosts import TestBed
from support.jobs.clusters import LOOKS
from support.jobs.mpi import Mpi


def test_from_the_login_node(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    """On h3, for a job on h1 and h2, over TLS, by the job's scheduler file."""
    file = tmp_path / "cluster.json"
    options = ["--scheduler-file", str(file)]
    job = mpirun.start(LOOKS + "go_on()\n", 2, command=options, bed=hosts, hosts=["h1", "h2"])
    job.wait_for("FACTS")
    top = [sys.executable, "-m", "dask_gpu_mpi", "top", "--scheduler-file", str(file), "--json"]
    done = subprocess.run(hosts.on("h3", top), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {row["node"] for row in seen["rows"]} == {"h1", "h2"}
    assert all(row["status"] == "running" and row["host_memory"] for row in seen["rows"]), seen["rows"]
    job.go_on()
