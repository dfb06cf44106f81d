"""A host that falls silent: its network is gone, and nothing on it can be told anything."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import until
from support.jobs.faults import end, mark_time, start
from support.jobs.mpi import Job, Mpi

pytestmark = pytest.mark.both_mpis


def on_host(job: Job, bed: TestBed, host: str) -> list[int]:
    """The job's processes on this host."""
    look = bed.on(host, ["readlink", "/proc/self/ns/net"])
    there = subprocess.run(look, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return [pid for pid in job.processes() if network_of(pid) == there]


def network_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


@pytest.mark.slow
def test_silent_host_at_the_end(mpirun: Mpi, bed: TestBed) -> None:
    """The script ends while a host is silent: the job ends without it, and says so."""
    body = "mark('ready')\nwait_until(lambda: marked('silent'))\nmark()\nsys.exit(3)\n"
    job = start(mpirun, "command", body, bed=bed)
    mark_time(job, "ready")
    bed.ip("h2", "link", "set", "eth0", "down")
    (job.directory / "mark-silent").touch()
    job.launcher.wait(60)
    seconds = time.time() - mark_time(job, "end")
    assert job.stderr.count("the launcher has not ended 10 s after the job was aborted: it is killed") == 1
    # Nobody but its own batch system can end what runs on the silent host.
    until(lambda: not on_host(job, bed, "h1"), 3.0)
    job.kill()
    since = time.time() - seconds
    # the launcher would wait for its process on that host for ever
    end(
        mpirun,
        job,
        -9,
        45,
        since=since,
        says=("no response from rank 1 of 2 at the end",),
        tracebacks=None,
        scratch=True,
    )
