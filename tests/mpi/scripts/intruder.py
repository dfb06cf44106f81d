import os
import pickle
import sys
import time

from mpi4py import MPI

from dask_gpu_mpi.mpi import mailbox, rendezvous, wire
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.mpi.wire import KeyPair
from support.jobs.scripts.tell import tell


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
if sys.argv[1] == "free":
    box.free(30, 60, agrees=True)
    tell(**{f"freed{rank}": box._comm is None})
