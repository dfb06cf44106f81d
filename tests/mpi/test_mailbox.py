"""The communicator of our own, and its end."""

from __future__ import annotations

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
    return Mailbox(world, "h", time.monotonic() + 30)

# Rank 1 is there while rank 0 does other things and rank 2 has not come; a message is on its way that nobody waits for.
first = mailbox()
if rank == 0:
    while 1 not in first._byes:
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

# Rank 2 does not come: it stays open, for all.
kept = None if rank == 2 else second.free(0.3, 60)
tell(**{f"rank{rank}": [freed, kept]}, **({"heard": heard} if rank == 0 else {}))
"""
)


def test_freed_where_all_ranks_come(mpirun: Mpi) -> None:
    told = facts(mpirun.run(PROGRAM, 3).check())
    assert told["rank0"] == told["rank1"] == [True, False]
    assert told["rank2"] == [True, None]
    assert told["heard"] == ["here"] * 3
