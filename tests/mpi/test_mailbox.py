"""The communicator of our own, and its end."""

from __future__ import annotations

from pathlib import Path

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
box.close() if rank == ENDS else box.free(60, 60, agrees=True)
tell(**{f"rank{rank}": [box._comm is None, time.monotonic() - started < 20]})
"""
)


@pytest.mark.parametrize("ends", [0, 1])
def test_not_freed_where_a_rank_ends(mpirun: Mpi, ends: int) -> None:
    """It does not agree, and says so: the others need not wait for it until their timeout."""
    told = facts(mpirun.run(ENDS.replace("ENDS", str(ends)), 3).check())
    assert [told[f"rank{rank}"] for rank in range(3)] == [[False, True]] * 3


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
tell(**{f"rank{box.rank}": len(box._exchanged["last"])})
"""
)


@pytest.mark.parametrize(
    ("version", "received"), [("MPICH Version:      4.0.2", 0), ("MPICH Version:  5.0.2", 1)]
)
def test_no_last_messages_under_mpich_4(mpirun: Mpi, version: str, received: int) -> None:
    """Debian's 4.0.2 hung in MPI_Finalize after them, on two nodes."""
    told = facts(mpirun.run(MPICH_4.replace("VERSION", repr(version)), 2).check())
    assert told == {"rank0": received, "rank1": received}


INTRUDER = (
    TELL
    + """
import pickle, time
from mpi4py import MPI
from dask_gpu_mpi.mpi import mailbox, rendezvous, wire
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.mpi.wire import KeyPair

def refuse(*_):
    raise AssertionError("pickled")

MPI.pickle.__init__(refuse, refuse)
wire.LARGEST = wire.Wire.__init__.__kwdefaults__["largest"] = 100_000
world = MPI.COMM_WORLD
rank = world.rank

class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)

bombs = [pickle.dumps(Bomb()), pickle.dumps(("text", Bomb())), pickle.dumps([Bomb()] * 100)]
# to the next rank: any length there is, eager messages and those that take a handshake, and those that are too large
garbage = [bytes([rank]) * length for length in (0, 1, 7, 8, 9, 23, 24, 25, 4095, 65537, 99_999)]
large = [bytes(100_001), bytes(3_000_000)]
requests = []

def inject(comm, tag, data, to):
    request = comm.Isend([data, MPI.BYTE], dest=to, tag=tag)
    if data not in large:  # nobody receives these
        requests.append(request)

others = [each for each in range(3) if each != rank]
first = [] if rank == 0 else [*bombs, b"", b"key", *large]
for data in first:  # before anybody has said anything; not as a key would be
    inject(world, rendezvous._TAG, data, 0)
box = Mailbox(world, "h", time.monotonic() + 30, {"text": str})
comm, key = box._comm, KeyPair()
foreign = key.channel(KeyPair().public, 1, to_rank=rank == 0)
for to in others:
    forged = [*bombs, *garbage, *large, foreign.seal(b"forged")]
    for data in forged:
        inject(comm, mailbox._TAG, data, to)
if rank:
    seal = box._channels[0].seal
    sealed = []
    box._channels[0].seal = lambda data: sealed.append(seal(data)) or sealed[-1]
    box.send(0, "text", f"of {rank}" + "x" * 50_000)
    for _ in range(3):  # what it has sent already; and on the wrong way
        inject(comm, mailbox._TAG, sealed[0], 0)
    inject(comm, mailbox._TAG, sealed[0], 3 - rank)
else:
    box.send_all("text", "of 0")

expected = {1, 2} if rank == 0 else {0}
heard = {}
dropped = 2 * (7 + 17 + 3) if rank == 0 else 17 * 2 + 1
limit = time.monotonic() + 30
while (heard.keys() != expected or box._drops.count < dropped) and time.monotonic() < limit:
    for mail in box.receive():
        assert mail.source not in heard
        heard[mail.source] = mail.payload[:4]
    time.sleep(0.002)
MPI.Request.Waitall(requests)
tell(**{f"rank{rank}": [sorted(heard.items()), box._drops.count - dropped]})
if HOW == "free":
    box.free(30, 60, agrees=True)
    tell(**{f"freed{rank}": box._comm is None})
"""
)


@pytest.mark.parametrize("how", ["free", "exit"])
def test_what_strangers_send_is_dropped_and_the_job_goes_on(mpirun: Mpi, tmp_path: Path, how: str) -> None:
    """On the communicator and with the tag that the messages have, as whoever reaches a port of the MPI library can."""
    bomb = tmp_path / "bomb"
    program = INTRUDER.replace("HOW", repr(how))
    done = mpirun.run(program, 3, env={"BOMB": str(bomb)}, timeout=60).check(0)
    told = facts(done)
    assert told["rank0"] == [[[1, "of 1"], [2, "of 2"]], 0]
    assert told["rank1"] == told["rank2"] == [[[0, "of 0"]], 0]
    if how == "free":
        assert [told[f"freed{rank}"] for rank in range(3)] == [True] * 3
    assert not bomb.exists()
    warnings = [line for line in done.stderr.splitlines() if "dropped" in line]
    assert 3 <= len(warnings) <= 6  # two counters, since the test has its own limit for each rank
