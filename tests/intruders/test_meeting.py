"""Strangers while the ranks meet: what they send in the names of ranks, and how long they can."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import TELL, alive, facts, listening
from support.jobs.mpi import Job, Mpi
from support.jobs.scripts import script

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow, pytest.mark.both_mpis]

INTRUDER = script("mpi/scripts/intruder.py")
#: Of an unattacked job.
WAITS = TELL + "from dask_gpu_mpi import initialize\ninitialize()\ntell(up=True)\ngo_on()\n"


def inherited(job: Job) -> set[tuple[str, int]]:
    """What the launcher listens on: under MPICH its children have a descriptor of it."""
    launchers = job.processes(r"^\S*(mpirun|mpiexec|prted|prterun|hydra)")
    found: set[tuple[str, int]] = set()
    for pid in launchers:
        with contextlib.suppress(OSError):
            found |= {*listening(pid)}
    return found


def test_forged_messages_are_dropped_and_the_job_starts(mpirun: Mpi, tmp_path: Path) -> None:
    """Random bytes, pickles, what is sealed with a wrong key, and what a rank has sent before."""
    bomb = tmp_path / "bomb"
    done = mpirun.run(INTRUDER, 3, args=["forged"], env={"BOMB": str(bomb)}).check(0)
    assert facts(done) == {"answer": 42, "workers": 3}
    assert not bomb.exists()
    warnings = re.findall(
        r"warning: rank (\d) on \S+: a message was dropped that no rank of this job has sent", done.stderr
    )
    assert sorted(warnings) == ["0", "1", "2"]  # a line of each
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["first key", "second key"])
def test_a_second_key_in_the_name_of_a_rank_ends_the_start(mpirun: Mpi, how: str) -> None:
    done = mpirun.run(INTRUDER, 3, args=[how])
    two = "two different keys came from rank 1: another process sends MPI messages in its name"
    done.refused(two, "Fix: find out who else reaches the ports of the MPI library", rc=done.rc or 1)
    assert facts(done) == {}


def test_another_key_does_not_open_the_credentials(mpirun: Mpi) -> None:
    """Though its owner gets all that the rank gets."""
    done = mpirun.run(INTRUDER, 3, args=["listens"]).check(0)
    assert facts(done) == {"answer": 42, "workers": 3, "read": False}


def test_a_key_opens_them_in_the_place_of_one_that_never_comes(mpirun: Mpi) -> None:
    """As docs/security-audit.md says: rank 0 can't know better."""
    job = mpirun.start(INTRUDER, 3, args=["only key"])
    job.wait_for('"read": ')
    assert facts(job) == {"read": True}


def test_mpi_listens_only_while_the_ranks_meet(
    mpirun: Mpi, hosts: TestBed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is printed; how long it may be depends on the machine."""
    job = mpirun.start(
        WAITS, 2, bed=hosts, hosts=hosts.hosts[:2], env={"OMPI_MCA_btl": None, "OMPI_MCA_pml": None}
    )
    began = time.monotonic()
    seen: dict[int, list[float]] = {}
    children: set[int] = set()
    launchers: set[tuple[str, int]] = set()
    up = 0.0
    while not up or any(map(alive, children)):
        now = time.monotonic()
        assert now < began + 60, job.output
        if len(children) < 2:
            children |= job.processes(r"dask_gpu_mpi\.mpi\.world").keys()
            launchers |= inherited(job)
        for pid in children:
            with contextlib.suppress(OSError):
                if {*listening(pid)} - launchers:
                    seen.setdefault(pid, [now, now])[1] = time.monotonic()
        if not up and "FACTS" in job.stdout:
            up = time.monotonic()
        time.sleep(0.005)
    assert seen.keys() == children
    assert len(children) == 2
    assert job.processes(r"dask_gpu_mpi\.mpi\.world") == {}
    job.go_on()
    with capsys.disabled():
        spans = ", ".join(f"{last - first:.2f} s" for first, last in seen.values())
        print(
            f"\n{mpirun.name}, two hosts: ports of MPI were open for {spans}; the cluster was up after {up - began:.2f} s"
        )
