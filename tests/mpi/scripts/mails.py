import time

from mpi4py import MPI

from dask_gpu_mpi.mpi.mailbox import Mailbox
from support.jobs.scripts.tell import tell

world = MPI.COMM_WORLD
rank = world.rank


def free(box, *seconds):
    box.free(*seconds, agrees=True)
    return box._comm is None


def mailbox():
    return Mailbox(world, "h", time.monotonic() + 30, {"closed": int, "here": int})


# Rank 1 is there while rank 0 does other things and rank 2 has not come; a message is on its way that nobody waits for.
first = mailbox()
if rank == 0:
    while 1 not in first._exchanged["free"]:
        first.receive()
        time.sleep(0.002)
    world.send("now", dest=2)
elif rank == 2:
    world.recv(source=0)
    first.send(0, "closed", 2)
freed = free(first, 30, 60)

# Another gets the number of the first, and has none of its messages.
second = mailbox()
second.send(0, "here", rank)
heard = []
while rank == 0 and len(heard) < 3:
    heard += [mail.kind for mail in second.receive()]
    time.sleep(0.002)

# Rank 2 does not come: it stays open, for all, also when rank 2 comes later and rank 0 once more.
kept = None if rank == 2 else free(second, 0.3, 60)
world.Barrier()
late = free(second, 60, 60)
tell(
    **{f"rank{rank}": {"freed": freed, "kept": kept, "late": late}}, **({"heard": heard} if rank == 0 else {})
)
