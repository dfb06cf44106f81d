"""A host that falls silent: its network is gone, and nothing on it can be told anything."""

from __future__ import annotations

import time

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import network_of, until
from support.jobs.faults import end, mark_time, set_mark, start
from support.jobs.mpi import Job, Mpi

pytestmark = pytest.mark.both_mpis


def on_host(job: Job, bed: TestBed, host: str) -> list[int]:
    """The job's processes on this host."""
    there = network_of(bed.holder(host))
    return [pid for pid in job.processes() if network_of(pid) == there]


@pytest.mark.slow
def test_silent_host_at_the_end(mpirun: Mpi, bed: TestBed) -> None:
    """The script ends while a host is silent: the job ends without it, and says so."""
    body = "mark('ready')\nwait_until(lambda: marked('silent'))\nmark()\nsys.exit(3)\n"
    job = start(mpirun, "command", body, at="ready", bed=bed)
    bed.ip("h2", "link", "set", "eth0", "down")
    set_mark(job, "silent")
    job.launcher.wait(60)
    seconds = time.time() - mark_time(job, "end")
    assert job.stderr.count("the launcher has not ended 10 s after the job was aborted: it is killed") == 1
    # Nobody but its own batch system can end what runs on the silent host.
    until(lambda: not on_host(job, bed, "h1"), 3.0)
    job.kill()
    # the launcher would wait for its process on that host for ever
    says = ("no response from rank 1 of 2 at the end",)
    end(job, -9, 45, since=time.time() - seconds, says=says, tracebacks=None, scratch=True)
