"""A job among strangers: connections that are half opened, at every port of Dask's, in processes with few descriptors."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from support.jobs.clusters import facts, until
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

#: Descriptors of each process, and connections to each port.
LIMIT, STRANGERS = 192, 150

SCRIPT = script("mpi/scripts/half_open.py")


@pytest.mark.quick("mpich")
def test_half_open_connections(mpirun: Mpi) -> None:
    # as a shell's user has it: a soft limit below the hard one
    shell = f'ulimit -Sn {LIMIT - 64}; ulimit -Hn {LIMIT}; exec "$0" -c "$1"'
    job = mpirun.start(["sh", "-c", shell, sys.executable, SCRIPT], 2)
    job.wait_for("so_far")
    told = facts(job)
    assert told["limits"] == [[LIMIT, LIMIT]] * 3
    assert len(set(told["places"])) == 5
    with contextlib.ExitStack() as strangers:
        for _ in range(STRANGERS):
            for place in told["places"]:
                host, _, port = place.partition("://")[2].rpartition(":")
                strangers.enter_context(socket.create_connection((host, int(port)), 10))
        count = facts(job)["so_far"]
        until(lambda: facts(job)["so_far"] > count + 6, 30, "work and new clients among the strangers")
        (job.directory / "go-on").touch()
        done = job.wait(30).check(0)
    assert facts(done)["sums"] == [210]
    assert "Traceback" not in done.stderr
    assert "too many connections" in done.stderr
    # of each of the five processes two lines a minute at most, beside what the job itself says
    lines = [line for line in done.stderr.splitlines() if not line.startswith("dask_gpu_mpi: ")]
    assert 1 <= len(lines) <= 20, done.stderr
