"""A job whose meeting is attacked: strangers who reach MPI's ports send messages in the names of ranks. Its argument says what.

MPI's process of a rank sends them, so they come from that rank, with the tag of the ranks' own messages.
"""

import inspect
import os
import sys

from support.jobs.scripts.tell import tell


def strangers(how):
    """In MPI's process of a rank: send forged messages before its own, or another key as its first, second or only one.

    Rank 1's tells whether the other key opens the credentials.
    """
    import dataclasses
    import pickle
    from typing import Any

    from dask_gpu_mpi.base.plain_data import from_plain, pack, unpack
    from dask_gpu_mpi.mpi import world
    from dask_gpu_mpi.startup.meeting import ForeignMessageError, Hello, KeyPair
    from dask_gpu_mpi.startup.messages import Kind

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (os.environ.get("BOMB", "bomb"),)

    key = KeyPair()
    hello = pack([Kind.HELLO, Hello("h", key.public)])
    sealed = key.channel(KeyPair().public, 1, to_rank=False).seal(pack(None))
    garbage = [bytes([7]) * length for length in (0, 1, 7, 8, 9, 23, 24, 25, 4095, 65537, world.LARGEST)]
    large = [bytes(world.LARGEST + 1), bytes(3_000_000)]  # nobody receives these
    bombs = [pickle.dumps(Bomb()), pickle.dumps([Bomb()] * 100)]
    forged = [
        *bombs,
        *garbage,
        *large,
        pack([Kind.ENTERED, sealed]),
        pack([Kind.FAIL, sealed]),
        pack(["no kind", b""]),
    ]
    post, posted = world.MpiWorld.send, []

    def send(self, rank, data):
        """A rank's own message, after or before those of a stranger."""
        mine = self._comm.rank
        if how == "forged":
            for each in range(self._comm.size):
                for message in forged if each != mine else ():
                    post(self, each, message)
                if {each, mine} == {1, 2}:  # not by rank 0
                    post(self, each, hello)
        if how == "first key" and mine == 1 and not posted:
            post(self, 0, hello)
        if how == "only key" and mine == 1:  # as the rank's own, but for the key
            true = from_plain(Hello, unpack(data)[1])
            data = pack([Kind.HELLO, dataclasses.replace(true, key=key.public)])
        post(self, rank, data)
        posted.append(data)
        if how == "second key" and mine == 1 and len(posted) == 1:
            post(self, 0, hello)
        if how == "forged" and len(posted) > 1:
            for _ in range(3):  # what it has sent already, and to others
                post(self, rank, data)
            if mine:
                post(self, 3 - mine, data)

    got, channels = world.MpiWorld.receive, []

    def receive(self):
        """What has come, after a stranger has read it."""
        found = got(self)
        for _, data in found if self._comm.rank == 1 and how in ("listens", "only key") else ():
            kind, payload = from_plain(tuple[str, Any], unpack(data))
            if kind == Kind.HELLO:
                channels.append(key.channel(from_plain(Hello, payload).key, 1, to_rank=False))
            elif kind == Kind.ENTER:
                try:
                    tell(read=b"PRIVATE KEY" in channels[0].open(payload))
                except ForeignMessageError:
                    tell(read=False)
        return found

    world.MpiWorld.send, world.MpiWorld.receive = send, receive


def main(how):
    from dask_gpu_mpi.mpi import world

    text = f"import json, os\n{inspect.getsource(tell)}\n{inspect.getsource(strangers)}\nstrangers({how!r})\n"
    first, then = world._BOOT.split("; from ", 1)
    world._BOOT = f"{first}; exec({text!r}, globals()); from {then}"
    from dask_gpu_mpi import initialize

    session = initialize(worker_class="distributed.Nanny")
    with session.client() as client:
        tell(answer=client.submit(sum, [40, 2]).result(), workers=len(client.nthreads()))


main(sys.argv[1])
