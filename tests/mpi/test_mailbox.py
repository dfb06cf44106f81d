"""The communicator of our own, and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs.clusters import TELL, facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

pytestmark = pytest.mark.both_mpis

PROGRAM = script("mpi/scripts/mails.py")


@pytest.mark.quick
def test_freed_where_all_ranks_come(mpirun: Mpi) -> None:
    told = facts(mpirun.run(PROGRAM, 3).check())
    assert told["rank0"] == told["rank1"] == {"freed": True, "kept": False, "late": False}
    assert told["rank2"] == {"freed": True, "kept": None, "late": False}
    assert told["heard"] == ["here"] * 3


ENDS = (
    TELL
    + """
import time
from mpi4py import MPI
from dask_gpu_mpi.mpi.mailbox import Mailbox

MPI.Get_library_version = lambda: "any but MPICH 4"
rank = MPI.COMM_WORLD.rank
box = Mailbox(MPI.COMM_WORLD, "h", time.monotonic() + 30, {})
started = time.monotonic()
box.close() if rank == ENDS else box.free(60, 60, agrees=True)
tell(**{f"rank{rank}": {"freed": box._comm is None, "seconds": time.monotonic() - started}})
"""
)


@pytest.mark.parametrize("ends", [0, 1])
def test_not_freed_where_a_rank_ends(mpirun: Mpi, ends: int) -> None:
    """It does not agree, and says so: the others need not wait for it until their timeout."""
    told = facts(mpirun.run(ENDS.replace("ENDS", str(ends)), 3).check())
    for rank in range(3):
        found = told[f"rank{rank}"]
        assert not found["freed"], f"rank {rank} has freed its communicator"
        assert found["seconds"] < 20, f"rank {rank}"


MPICH_4 = (
    TELL
    + """
import time
from mpi4py import MPI
from dask_gpu_mpi.mpi.mailbox import Mailbox

received = []
for version in ("MPICH Version:      4.0.2", "MPICH Version:  5.0.2"):
    MPI.Get_library_version = lambda: version
    box = Mailbox(MPI.COMM_WORLD, "h", time.monotonic() + 30, {})
    box.close()
    MPI.COMM_WORLD.Barrier()
    received.append(len(box._exchanged["last"]))
tell(**{f"rank{box.rank}": received})
"""
)


def test_no_last_messages_under_mpich_4(mpirun: Mpi) -> None:
    """Debian's 4.0.2 hung in MPI_Finalize after them, on two nodes."""
    assert facts(mpirun.run(MPICH_4, 2).check()) == {"rank0": [0, 1], "rank1": [0, 1]}


INTRUDER = script("mpi/scripts/intruder.py")


@pytest.mark.quick(how="free")
@pytest.mark.parametrize("how", ["free", "exit"])
def test_what_strangers_send_is_dropped_and_the_job_goes_on(mpirun: Mpi, tmp_path: Path, how: str) -> None:
    """On the communicator and with the tag that the messages have, as whoever reaches a port of the MPI library can."""
    bomb = tmp_path / "bomb"
    done = mpirun.run(INTRUDER, 3, args=[how], env={"BOMB": str(bomb)}, timeout=60).check(0)
    told = facts(done)
    assert told["rank0"] == [[[1, "of 1"], [2, "of 2"]], 0]
    assert told["rank1"] == told["rank2"] == [[[0, "of 0"]], 0]
    if how == "free":
        assert [rank for rank in range(3) if not told[f"freed{rank}"]] == []
    assert not bomb.exists()
    warnings = [line for line in done.stderr.splitlines() if "dropped" in line]
    assert 3 <= len(warnings) <= 6  # two counters, since the test has its own limit for each rank
