"""The communicator of our own, and its end."""

from __future__ import annotations

import pytest

from clusters import TELL, facts
from harness import Mpi

PROGRAM = (
    TELL
    + """
import time
from mpi4py import MPI
from dask_gpu_mpi.mpi.mailbox import Mailbox

world = MPI.COMM_WORLD
rank = world.rank

def mailbox():
    return Mailbox(world, "h", time.monotonic() + 30, {"closed": int, "here": int})

# Rank 1 is there while rank 0 does other things and rank 2 has not come; a message is on its way that nobody waits for.
first = mailbox()
if rank == 0:
    while 1 not in first._last:
        first.receive()
        time.sleep(0.002)
    world.send("now", dest=2)
elif rank == 2:
    world.recv(source=0)
    first.send(0, "closed", 2)
freed = first.free(30, 60)

# Another gets the number of the first, and has none of its messages.
second = mailbox()
second.send(0, "here", rank)
heard = []
while rank == 0 and len(heard) < 3:
    heard += [mail.kind for mail in second.receive()]
    time.sleep(0.002)

# Rank 2 does not come: it stays open, for all, also when rank 2 comes later and rank 0 once more.
kept = None if rank == 2 else second.free(0.3, 60)
world.Barrier()
late = second.free(60, 60)
tell(**{f"rank{rank}": [freed, kept, late]}, **({"heard": heard} if rank == 0 else {}))
"""
)


def test_freed_where_all_ranks_come(mpirun: Mpi) -> None:
    told = facts(mpirun.run(PROGRAM, 3).check())
    assert told["rank0"] == told["rank1"] == [True, False, False]
    assert told["rank2"] == [True, None, False]
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
freed = box.close() if rank == ENDS else box.free(60, 60)
tell(**{f"rank{rank}": [freed, time.monotonic() - started < 20]})
"""
)


@pytest.mark.parametrize("ends", [0, 1])
def test_not_freed_where_a_rank_ends(mpirun: Mpi, ends: int) -> None:
    """Its last message is the same one: the others need not wait for it until their timeout."""
    told = facts(mpirun.run(ENDS.replace("ENDS", str(ends)), 3).check())
    assert [told[f"rank{rank}"] for rank in range(3)] == [
        [None if rank == ends else False, True] for rank in range(3)
    ]


MPICH_4 = (
    TELL
    + """
import time
from mpi4py import MPI
from dask_gpu_mpi.mpi.mailbox import Mailbox

MPI.Get_library_version = lambda: VERSION
box = Mailbox(MPI.COMM_WORLD, "h", time.monotonic() + 30, {})
box.close()
MPI.COMM_WORLD.Barrier()
tell(**{f"rank{box.rank}": len(box._last)})
"""
)


@pytest.mark.parametrize(
    ("version", "received"), [("MPICH Version:      4.0.2", 0), ("MPICH Version:  5.0.2", 1)]
)
def test_no_last_messages_under_mpich_4(mpirun: Mpi, version: str, received: int) -> None:
    """Debian's 4.0.2 hung in MPI_Finalize after them, on two nodes."""
    told = facts(mpirun.run(MPICH_4.replace("VERSION", repr(version)), 2).check())
    assert told == {"rank0": received, "rank1": received}
